/* Tokens of a worker's message straight to their clients' connections: see shortcut.py for what it means.

   Words      what tokens say: as text, and inside a JSON string. Learned one at a time.
   Shortcut   one answer: a descriptor of its connection, what stands before and behind the text of its events, the
              bytes that its stop strings begin with, and what it has taken since it was settled last.
   Board      the open short cuts of one worker's connection, by their numbers (open addressing, linear probing).

   Nothing waits here: a token that a connection does not take at once is refused, and nothing of it is kept; of an event
   that was taken in part, the rest is kept for whoever closes the short cut. Not thread-safe. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BROKEN 0x80000000u /* a token that was taken, by a connection that has taken a part of its event */

typedef uint32_t u32;
typedef uint64_t u64;

typedef struct { char *text; u32 num_text, num_json; } Word; /* `text`, then `json` in the same piece of memory */
typedef struct { Word *words; u32 num; } Words;
typedef struct { char *bytes; u32 num, cap; } Bytes;

#define MAX_BOUNDS 32
typedef struct { double sum, bounds[MAX_BOUNDS]; u64 counts[MAX_BOUNDS + 1]; u32 num; } Gaps; /* router/streaming/itl_histogram.py has the same */

typedef struct {
    const Words *words;
    int fd; /* below 0: nothing is written */
    char *frame; u32 before, behind;
    u64 stops[4]; int has_stops;
    const double *gap; /* seconds between events, 0 while the gateway is on time */
    double said_s, last_s;
    Gaps *gaps; /* between tokens, of many answers; NULL: they are not measured */
    u32 *ids, num_ids, cap_ids;
    Bytes held, rest;
} Shortcut;

typedef struct { u32 number; Shortcut *shortcut; } Place;
typedef struct { Place *places; u32 cap, num; Bytes event; } Board;

static int room(Bytes *b, u32 wanted) {
    if (wanted <= b->cap) return 1;
    u32 cap = b->cap ? b->cap : 256;
    while (cap < wanted) cap *= 2;
    char *moved = realloc(b->bytes, cap);
    if (!moved) return 0;
    b->bytes = moved; b->cap = cap;
    return 1;
}

static void add(Bytes *b, const void *bytes, u32 num) { /* there is room */
    if (num) memcpy(b->bytes + b->num, bytes, num);
    b->num += num;
}

/* ---- words ------------------------------------------------------------------------------------------------------- */

Words *words_new(u32 num) {
    Words *w = calloc(1, sizeof *w);
    if (w && !(w->words = calloc(num ? num : 1, sizeof *w->words))) { free(w); return NULL; }
    if (w) w->num = num;
    return w;
}

void words_free(Words *w) {
    for (u32 id = 0; id < w->num; id++) free(w->words[id].text);
    free(w->words); free(w);
}

int words_learn(Words *w, u32 id, const char *text, u32 num_text, const char *json, u32 num_json) {
    if (id >= w->num || w->words[id].text) return -1;
    char *both = malloc((size_t)num_text + num_json + 1);
    if (!both) return -1;
    memcpy(both, text, num_text); memcpy(both + num_text, json, num_json);
    w->words[id] = (Word){ both, num_text, num_json };
    return 0;
}

/* ---- one answer -------------------------------------------------------------------------------------------------- */

Shortcut *shortcut_new(const Words *words, int fd, const char *before, u32 num_before, const char *behind,
                       u32 num_behind, const u64 *stops, const double *gap) {
    Shortcut *s = calloc(1, sizeof *s);
    if (!s || !(s->frame = malloc((size_t)num_before + num_behind + 1))) { free(s); return NULL; }
    memcpy(s->frame, before, num_before); memcpy(s->frame + num_before, behind, num_behind);
    s->words = words; s->fd = fd; s->before = num_before; s->behind = num_behind; s->gap = gap;
    for (int i = 0; i < 4; i++) { s->stops[i] = stops[i]; s->has_stops |= stops[i] != 0; }
    return s;
}

/* From now on the time between tokens is counted there; the last one before was at `last_s`. */
void shortcut_measure(Shortcut *s, Gaps *gaps, double last_s) { s->gaps = gaps; s->last_s = last_s; }

static void count_gap(Gaps *g, double gap) {
    u32 at = 0;
    while (at < g->num && gap > g->bounds[at]) at++;
    g->counts[at]++; g->sum += gap;
}

/* Closes its descriptor. */
void shortcut_free(Shortcut *s) {
    if (s->fd >= 0) close(s->fd);
    free(s->frame); free(s->ids); free(s->held.bytes); free(s->rest.bytes); free(s);
}

/* How much there is to be settled: ids, bytes held, bytes of a rest. */
void shortcut_counts(const Shortcut *s, u32 *counts) {
    counts[0] = s->num_ids; counts[1] = s->held.num; counts[2] = s->rest.num;
}

/* The ids taken since the last time; when the last of them was. */
double shortcut_settle(Shortcut *s, u32 *ids) {
    if (s->num_ids) memcpy(ids, s->ids, s->num_ids * sizeof *ids);
    s->num_ids = 0;
    return s->last_s;
}

/* What could not be written: JSON of texts that wait for their time, and the end of an event. */
void shortcut_leave(Shortcut *s, char *held, char *rest) {
    if (s->held.num) memcpy(held, s->held.bytes, s->held.num);
    if (s->rest.num) memcpy(rest, s->rest.bytes, s->rest.num);
    s->held.num = s->rest.num = 0;
}

/* Texts that wait already. */
int shortcut_hold(Shortcut *s, const char *json, u32 num) {
    if (!room(&s->held, s->held.num + num)) return -1;
    add(&s->held, json, num);
    return 0;
}

static int stops_at(const Shortcut *s, const Word *w) {
    for (u32 i = 0; i < w->num_text; i++) {
        unsigned char c = (unsigned char)w->text[i];
        if (s->stops[c >> 6] >> (c & 63) & 1) return 1;
    }
    return 0;
}

/* An event of what is held and of `json`, as a chunk of HTTP/1.1. 0: it was not written, and nothing has changed. */
static int say(Board *b, Shortcut *s, const char *json, u32 num, double now) {
    static const char digits[] = "0123456789abcdef";
    u32 size = s->before + s->held.num + num + s->behind;
    Bytes *e = &b->event;
    if (!room(e, size + 16)) return 0;
    int shift = 28;
    while (shift && !(size >> shift)) shift -= 4;
    e->num = 0;
    for (; shift >= 0; shift -= 4) add(e, digits + (size >> shift & 15), 1);
    add(e, "\r\n", 2); add(e, s->frame, s->before); add(e, s->held.bytes, s->held.num); add(e, json, num);
    add(e, s->frame + s->before, s->behind); add(e, "\r\n", 2);
    if (!room(&s->rest, e->num)) return 0;
    ssize_t sent = send(s->fd, e->bytes, e->num, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) return 0;
    add(&s->rest, e->bytes + sent, e->num - (u32)sent);
    s->held.num = 0; s->said_s = now;
    return 1;
}

static int take(Board *b, Shortcut *s, u32 id, double now) {
    const Word *w = id < s->words->num ? s->words->words + id : NULL;
    if (!w || !w->text || s->rest.num || (s->has_stops && stops_at(s, w))) return 0;
    if (s->num_ids == s->cap_ids) {
        u32 cap = s->cap_ids ? 2 * s->cap_ids : 64;
        u32 *moved = realloc(s->ids, cap * sizeof *moved);
        if (!moved) return 0;
        s->ids = moved; s->cap_ids = cap;
    }
    if (w->num_json && s->fd >= 0) {
        const char *json = w->text + w->num_text;
        if (now >= s->said_s + *s->gap) {
            if (!say(b, s, json, w->num_json, now)) return 0;
        } else if (shortcut_hold(s, json, w->num_json)) return 0;
    }
    if (s->gaps) count_gap(s->gaps, now - s->last_s);
    s->ids[s->num_ids++] = id; s->last_s = now;
    return 1;
}

/* ---- one worker's -------------------------------------------------------------------------------------------------- */

Board *board_new(void) {
    Board *b = calloc(1, sizeof *b);
    if (b && !(b->places = calloc(64, sizeof *b->places))) { free(b); return NULL; }
    if (b) b->cap = 64;
    return b;
}

void board_free(Board *b) { free(b->places); free(b->event.bytes); free(b); }

static u32 place_of(const Board *b, u32 number) {
    u32 at = number & (b->cap - 1);
    while (b->places[at].shortcut && b->places[at].number != number) at = (at + 1) & (b->cap - 1);
    return at;
}

/* Under a number that none of the open ones has. */
int board_open(Board *b, u32 number, Shortcut *s) {
    if (2 * (b->num + 1) > b->cap) {
        Board larger = { calloc(2 * (size_t)b->cap, sizeof *b->places), 2 * b->cap, b->num, b->event };
        if (!larger.places) return -1;
        for (u32 at = 0; at < b->cap; at++)
            if (b->places[at].shortcut) larger.places[place_of(&larger, b->places[at].number)] = b->places[at];
        free(b->places);
        *b = larger;
    }
    b->places[place_of(b, number)] = (Place){ number, s };
    b->num++;
    return 0;
}

void board_close(Board *b, u32 number) {
    u32 hole = place_of(b, number), mask = b->cap - 1;
    if (!b->places[hole].shortcut) return;
    for (u32 at = (hole + 1) & mask; b->places[at].shortcut; at = (at + 1) & mask) {
        u32 home = b->places[at].number & mask; /* whoever is not found past a hole moves into it */
        if (((at - home) & mask) >= ((at - hole) & mask)) { b->places[hole] = b->places[at]; hole = at; }
    }
    b->places[hole].shortcut = NULL;
    b->num--;
}

/* A token each. Writes the indices of those that were not taken, and of BROKEN ones; how many they are. */
u32 board_deliver(Board *b, const u32 *numbers, const u32 *ids, u32 num, double now, u32 *left) {
    u32 num_left = 0;
    for (u32 i = 0; i < num; i++) {
        Shortcut *s = b->places[place_of(b, numbers[i])].shortcut;
        if (!s || !take(b, s, ids[i], now)) left[num_left++] = i;
        else if (s->rest.num) left[num_left++] = i | BROKEN;
    }
    return num_left;
}

/* Says what has waited long enough; how many answers have text that waits still. */
u32 board_flush(Board *b, double now) {
    u32 waiting = 0;
    for (u32 at = 0; at < b->cap; at++) {
        Shortcut *s = b->places[at].shortcut;
        if (!s || !s->held.num) continue;
        if (s->rest.num || now < s->said_s + *s->gap || !say(b, s, "", 0, now)) waiting++;
    }
    return waiting;
}
