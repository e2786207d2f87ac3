/* Plain tokens of a worker's message to the transports of their clients: see token_sink.py for what it means.

   Texts    what each token says, as text and inside a JSON string: columns that Python owns.
   Sink     one choice: what stands before and behind the text of its events (and between two copies of it), its transport's
            `write`, the bytes that its stop strings begin with, the ids that it refuses, and the tokens it has taken since
            its last report.
   Table    the open sinks of one worker's connection, by their numbers (open addressing, linear probing).

   A token that is refused has changed nothing. Called with Python's lock held. Not thread-safe. */

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DUE 0x80000000u /* a token that was taken, after which the sink's report is due */

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

/* Of Python's stable ABI: its headers are not needed to compile this. */
typedef struct _object PyObject;
extern PyObject *PyBytes_FromStringAndSize(const char *, ptrdiff_t);
extern char *PyBytes_AsString(PyObject *);
extern PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
extern void Py_DecRef(PyObject *);
extern void PyErr_Clear(void);

/* Token i says text[text_ends[i] .. text_ends[i + 1]]; kinds: 0 parts of a character, 1 plain, 2 special. */
typedef struct { const char *text, *json; const u32 *text_ends, *json_ends; const u8 *kinds; u32 num; } Texts;
typedef struct { char *bytes; u32 num, cap; } Bytes;
typedef struct { double sent_s; u8 blocked; } WriteState; /* token_sink.py has the same */

#define MAX_REFUSED 8 /* token_sink.py has the same */
#define MAX_BOUNDS 32
typedef struct { double sum, bounds[MAX_BOUNDS]; u64 counts[MAX_BOUNDS + 1]; u32 num; } Gaps; /* itl_histogram.py has the same */

typedef struct {
    const Texts *texts;
    int skips_special;
    PyObject *write; /* NULL: tokens are taken and not written */
    WriteState *state; /* of the transport */
    char *frame; u32 before, behind;
    u32 between; int is_twice; /* the text stands there again, behind this many bytes */
    u64 stops[4]; int has_stops;
    u32 refused[MAX_REFUSED], num_refused;
    const double *gap; /* seconds between events, 0 while the gateway is on time */
    double wrote_s, last_s, due_s;
    Gaps *gaps; /* between tokens, of many answers */
    u32 *ids, num_ids, cap_ids;
    Bytes held;
} Sink;

typedef struct { u32 number; Sink *sink; } Place;
typedef struct { Place *places; u32 cap, num; } Table;

/* ---- one choice ----------------------------------------------------------------------------------------------------- */

Sink *sink_new(const Texts *texts, int skips_special, const u64 *stops, const double *gap, Gaps *gaps) {
    Sink *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->texts = texts; s->skips_special = skips_special; s->gap = gap; s->gaps = gaps;
    for (int i = 0; i < 4; i++) { s->stops[i] = stops[i]; s->has_stops |= stops[i] != 0; }
    return s;
}

/* `write` and `state` outlive the sink. `frame`: what stands before the text, between its two copies if it `is_twice`,
   and behind. */
int sink_write_to(Sink *s, PyObject *write, WriteState *state, const char *frame, u32 before, u32 between, u32 behind,
                  int is_twice) {
    size_t size = (size_t)before + between + behind;
    if (!(s->frame = malloc(size + 1))) return -1;
    memcpy(s->frame, frame, size);
    s->before = before; s->between = between; s->behind = behind; s->is_twice = is_twice; s->write = write; s->state = state;
    return 0;
}

/* The ids at `ids`, MAX_REFUSED at most, go the ordinary way. */
void sink_refuse(Sink *s, const u32 *ids, u32 num) {
    memcpy(s->refused, ids, num * sizeof *ids);
    s->num_refused = num;
}

void sink_free(Sink *s) { free(s->frame); free(s->ids); free(s->held.bytes); free(s); }

/* From now on: the last token came at `last_s`, and a report is due at `due_s`. */
void sink_begin(Sink *s, double last_s, double due_s) { s->last_s = last_s; s->due_s = due_s; }

u32 sink_num_taken(const Sink *s) { return s->num_ids; }
u32 sink_num_held(const Sink *s) { return s->held.num; }

/* The ids taken since the last time; when the last of them came. */
double sink_report(Sink *s, u32 *ids) {
    if (s->num_ids) memcpy(ids, s->ids, s->num_ids * sizeof *ids);
    s->num_ids = 0;
    return s->last_s;
}

/* JSON of texts that wait for their time, which the caller writes. */
void sink_give_held(Sink *s, char *held) {
    if (s->held.num) memcpy(held, s->held.bytes, s->held.num);
    s->held.num = 0;
}

static int hold(Sink *s, const char *json, u32 num) {
    Bytes *b = &s->held;
    if (b->num + num > b->cap) {
        u32 cap = b->cap ? b->cap : 256;
        while (cap < b->num + num) cap *= 2;
        char *moved = realloc(b->bytes, cap);
        if (!moved) return 0;
        b->bytes = moved; b->cap = cap;
    }
    memcpy(b->bytes + b->num, json, num);
    b->num += num;
    return 1;
}

static char *put(char *at, const void *bytes, u32 num) {
    if (num) memcpy(at, bytes, num);
    return at + num;
}

/* An event of what is held and of `json`, as a chunk of HTTP/1.1. 0: it was not written, and nothing has changed. */
static int say(Sink *s, const char *json, u32 num, double now) {
    static const char digits[] = "0123456789abcdef";
    u32 num_text = s->held.num + num, size = s->before + num_text + s->behind;
    if (s->is_twice) size += s->between + num_text;
    if (s->state->blocked) return 0;
    int shift = 28;
    while (shift && !(size >> shift)) shift -= 4;
    PyObject *chunk = PyBytes_FromStringAndSize(NULL, (ptrdiff_t)size + shift / 4 + 5);
    if (!chunk) { PyErr_Clear(); return 0; }
    char *at = PyBytes_AsString(chunk);
    for (; shift >= 0; shift -= 4) *at++ = digits[size >> shift & 15];
    at = put(at, "\r\n", 2); at = put(at, s->frame, s->before); at = put(at, s->held.bytes, s->held.num);
    at = put(at, json, num);
    if (s->is_twice) {
        at = put(at, s->frame + s->before, s->between);
        at = put(at, s->held.bytes, s->held.num); at = put(at, json, num);
    }
    at = put(at, s->frame + s->before + s->between, s->behind); put(at, "\r\n", 2);
    PyObject *done = PyObject_CallFunctionObjArgs(s->write, chunk, NULL);
    Py_DecRef(chunk);
    if (!done) { PyErr_Clear(); return 0; } /* the connection closes */
    Py_DecRef(done);
    s->held.num = 0; s->wrote_s = s->state->sent_s = now;
    return 1;
}

static int may_stop(const Sink *s, const char *text, const char *end) {
    for (; text < end; text++) {
        unsigned char c = (unsigned char)*text;
        if (s->stops[c >> 6] >> (c & 63) & 1) return 1;
    }
    return 0;
}

static int take(Sink *s, u32 id, double now) {
    const Texts *t = s->texts;
    if (id >= t->num || !t->kinds[id]) return 0;
    for (u32 i = 0; i < s->num_refused; i++)
        if (s->refused[i] == id) return 0;
    int hidden = s->skips_special && t->kinds[id] == 2;
    if (!hidden && s->has_stops && may_stop(s, t->text + t->text_ends[id], t->text + t->text_ends[id + 1])) return 0;
    if (s->num_ids == s->cap_ids) {
        u32 cap = s->cap_ids ? 2 * s->cap_ids : 64;
        u32 *moved = realloc(s->ids, cap * sizeof *moved);
        if (!moved) return 0;
        s->ids = moved; s->cap_ids = cap;
    }
    u32 num = hidden ? 0 : t->json_ends[id + 1] - t->json_ends[id];
    if (num && s->write) {
        const char *json = t->json + t->json_ends[id];
        if (now < s->wrote_s + *s->gap) {
            if (!hold(s, json, num)) return 0;
        } else if (!say(s, json, num, now)) return 0;
    }
    Gaps *g = s->gaps;
    u32 at = 0;
    while (at < g->num && now - s->last_s > g->bounds[at]) at++;
    g->counts[at]++; g->sum += now - s->last_s;
    s->ids[s->num_ids++] = id; s->last_s = now;
    return 1;
}

/* ---- one worker's connection ----------------------------------------------------------------------------------------- */

Table *table_new(void) {
    Table *t = calloc(1, sizeof *t);
    if (t && !(t->places = calloc(64, sizeof *t->places))) { free(t); return NULL; }
    if (t) t->cap = 64;
    return t;
}

void table_free(Table *t) { free(t->places); free(t); }

static u32 place_of(const Table *t, u32 number) {
    u32 at = number & (t->cap - 1);
    while (t->places[at].sink && t->places[at].number != number) at = (at + 1) & (t->cap - 1);
    return at;
}

/* Under a number that none of the open ones has. */
int table_open(Table *t, u32 number, Sink *s) {
    if (2 * (t->num + 1) > t->cap) {
        Table larger = { calloc(2 * (size_t)t->cap, sizeof *t->places), 2 * t->cap, t->num };
        if (!larger.places) return -1;
        for (u32 at = 0; at < t->cap; at++)
            if (t->places[at].sink) larger.places[place_of(&larger, t->places[at].number)] = t->places[at];
        free(t->places);
        *t = larger;
    }
    t->places[place_of(t, number)] = (Place){ number, s };
    t->num++;
    return 0;
}

void table_close(Table *t, u32 number) {
    u32 hole = place_of(t, number), mask = t->cap - 1;
    if (!t->places[hole].sink) return;
    for (u32 at = (hole + 1) & mask; t->places[at].sink; at = (at + 1) & mask) {
        u32 home = t->places[at].number & mask; /* an entry that is not found past a hole moves into it */
        if (((at - home) & mask) >= ((at - hole) & mask)) { t->places[hole] = t->places[at]; hole = at; }
    }
    t->places[hole].sink = NULL;
    t->num--;
}

/* A token each. Writes the indices of those that were not taken, and of DUE ones; how many they are. */
u32 table_deliver(Table *t, const u32 *numbers, const u32 *ids, u32 num, double now, u32 *left) {
    u32 num_left = 0;
    for (u32 i = 0; i < num; i++) {
        Sink *s = t->places[place_of(t, numbers[i])].sink;
        if (!s || !take(s, ids[i], now)) left[num_left++] = i;
        else if (now >= s->due_s) left[num_left++] = i | DUE;
    }
    return num_left;
}

/* Writes what has waited long enough; how many choices have text that waits still. */
u32 table_flush(Table *t, double now) {
    u32 waiting = 0;
    for (u32 at = 0; at < t->cap; at++) {
        Sink *s = t->places[at].sink;
        if (s && s->held.num && (now < s->wrote_s + *s->gap || !say(s, "", 0, now))) waiting++;
    }
    return waiting;
}
