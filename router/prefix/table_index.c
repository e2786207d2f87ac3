/* The prefix index as tables: see table.py for what it means, and docs/adr/0009 for why it is built so.

   Entry   one block that somebody holds, or that is the parent of one: its hash, its parent, its children (a list),
           and the number of a set of workers. Entries are found through buckets that are split one at a time
           (linear hashing), so that no insertion pays for all others.
   set     a bit a worker, and where some worker has a host tier, another one a worker for that; equal sets are stored
           once and counted, for the blocks of a chain mostly have the same.
   Worker  ids of its blocks (with stale ones, dropped when they are half), and how many of its blocks are orphans:
           their parent is not held by the worker. Without orphans, holding block i means holding all before it, and a
           match is a bisection. With orphans, or more children to look at than MAX_CHILDREN, the worker is walked.
   view    what is held ANYWHERE, in either tier, or ON_DEVICE; the latter is only kept of a worker that has said that
           it has blocks on its host, and equals the former for all others. Orphans are counted in each.

   Not thread-safe. Out of memory: functions that insert return -1 and leave a table that may only be freed. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROOT 0u
#define UNKNOWN 0xffffffffu
#define MAX_CHILDREN 4096
#define MAX_WORDS 64 /* of a set: 4,096 workers */
#define APART 0x80000000u
#define AHEAD 16     /* blocks whose memory is asked for before it is read */
#define DEVICE 0u    /* tiers: protos.values.Tier */
#define HOST 1u
#define ANYWHERE 0u  /* views */
#define ON_DEVICE 1u

typedef uint32_t u32;
typedef uint64_t u64;

typedef struct { u64 key[2]; u32 parent, set, next, child, left, right; } Entry;
typedef struct { u32 *ids, num_ids, cap, live, held, hosted, orphans[2]; int unsure[2], tiered; } Worker;
typedef struct { u64 key; double until; } Until;
typedef struct { double until; u32 slot, num; u32 *ids; } Batch;

typedef struct {
    Entry *entries; u32 num_entries, cap_entries, free_entry, num_live;
    u32 *heads, num_heads, cap_heads, half; /* half: the largest power of two that is not above num_heads */
    u64 *bits; u32 *refs, *set_next, num_sets, cap_sets, free_set, words, tiers, width, second;
    u32 *set_heads, num_set_heads;
    u32 memo_from, memo_to, memo_place; int memo_on;
    Worker workers[MAX_WORDS * 64];
    u64 irregular[2][MAX_WORDS], tiered[MAX_WORDS];
    Until *untils; u32 num_untils, cap_untils;
    Batch *batches; u32 num_batches, cap_batches;
    u64 mix[2];
} Table;

static int grow(void **array, u32 *cap, u32 wanted, size_t size) {
    if (wanted <= *cap) return 0;
    u64 larger = *cap ? (u64)*cap * 2 : 64;
    while (larger < wanted) larger *= 2;
    if (larger >= UNKNOWN) larger = UNKNOWN - 1;
    void *moved = larger < wanted ? NULL : realloc(*array, larger * size);
    if (!moved) return -1;
    *array = moved; *cap = (u32)larger;
    return 0;
}

/* -- sets ---------------------------------------------------------------------------------------------------------- */

static u64 *set_bits(const Table *t, u32 set) { return t->bits + (u64)set * t->width; }

static u64 word_of(const Table *t, u32 set, u32 word, u32 view) {
    const u64 *bits = set_bits(t, set) + word;
    return *bits | bits[view == ON_DEVICE ? 0 : t->second]; /* of the other tier; with one tier it is the same word */
}

static void shape(Table *t, u32 words, u32 tiers) {
    t->words = words; t->tiers = tiers; t->width = words * tiers; t->second = tiers == 1 ? 0 : words;
    t->memo_from = UNKNOWN;
}

static int has(const Table *t, u32 set, u32 slot, u32 view) {
    return (int)(word_of(t, set, slot / 64, view) >> (slot % 64) & 1);
}

static int has_in(const Table *t, u32 set, u32 slot, u32 tier) {
    return tier < t->tiers && (int)(set_bits(t, set)[tier * t->words + slot / 64] >> (slot % 64) & 1);
}

static u32 set_bucket(const Table *t, const u64 *bits) {
    u64 mixed = t->mix[0];
    for (u32 i = 0; i < t->width; i++) mixed = (mixed ^ bits[i]) * 0x9E3779B97F4A7C15ull, mixed ^= mixed >> 29;
    return (u32)(mixed >> 7) & (t->num_set_heads - 1);
}

static void set_unlink(Table *t, u32 set) {
    u32 *link = &t->set_heads[set_bucket(t, set_bits(t, set))];
    while (*link != set) link = &t->set_next[*link];
    *link = t->set_next[set];
}

static void set_link(Table *t, u32 set) {
    u32 *head = &t->set_heads[set_bucket(t, set_bits(t, set))];
    t->set_next[set] = *head; *head = set;
}

static int set_resize(Table *t, u32 num_heads) {
    u32 *heads = calloc(num_heads, sizeof *heads);
    if (!heads) return -1;
    free(t->set_heads);
    t->set_heads = heads; t->num_set_heads = num_heads;
    for (u32 set = 1; set < t->num_sets; set++) if (t->refs[set]) set_link(t, set);
    return 0;
}

static int sets_grow(Table *t, u32 wanted) {
    u32 cap = t->cap_sets, also = t->cap_sets, too = t->cap_sets;
    if (wanted <= cap) return 0;
    if (grow((void **)&t->bits, &cap, wanted, t->width * sizeof(u64)) || grow((void **)&t->refs, &also, wanted, 4)
        || grow((void **)&t->set_next, &too, wanted, 4)) return -1;
    t->cap_sets = cap;
    return 0;
}

/* Makes room in every set for workers up to `slot`, and for the tier. */
static int sets_widen(Table *t, u32 slot, u32 tier) {
    u32 words = t->words, tiers = tier >= t->tiers ? tier + 1 : t->tiers;
    while (slot >= words * 64) words *= 2;
    if (words == t->words && tiers == t->tiers) return 0;
    u64 *wide = calloc((size_t)t->cap_sets * words * tiers, sizeof *wide);
    if (!wide) return -1;
    for (u32 set = 0; set < t->num_sets; set++)
        for (u32 k = 0; k < t->tiers; k++)
            memcpy(wide + ((u64)set * tiers + k) * words, set_bits(t, set) + k * t->words, t->words * sizeof *wide);
    free(t->bits);
    t->bits = wide;
    shape(t, words, tiers);
    return set_resize(t, t->num_set_heads);
}

static void set_drop(Table *t, u32 set) {
    if (set == 0 || --t->refs[set]) return;
    set_unlink(t, set);
    t->set_next[set] = t->free_set; t->free_set = set;
    if (t->memo_to == set || t->memo_from == set) t->memo_from = UNKNOWN;
}

/* The set with one worker more or less in a tier, counted once more; UNKNOWN without memory. */
static u32 set_changed(Table *t, u32 from, u32 slot, u32 tier, int on) {
    u32 place = tier * t->words * 64 + slot, size = t->width;
    if (t->memo_from == from && t->memo_place == place && t->memo_on == on) {
        if (t->memo_to) t->refs[t->memo_to]++;
        return t->memo_to;
    }
    u64 bits[2 * MAX_WORDS], any = 0;
    memcpy(bits, set_bits(t, from), size * sizeof *bits);
    if (on) bits[place / 64] |= 1ull << (place % 64);
    else bits[place / 64] &= ~(1ull << (place % 64));
    for (u32 i = 0; i < size; i++) any |= bits[i];
    u32 set = 0;
    if (any) {
        set = t->set_heads[set_bucket(t, bits)];
        while (set && memcmp(set_bits(t, set), bits, size * sizeof *bits)) set = t->set_next[set];
        if (!set) {
            if ((set = t->free_set)) t->free_set = t->set_next[set];
            else {
                if (sets_grow(t, t->num_sets + 1)) return UNKNOWN;
                set = t->num_sets++;
                t->refs[set] = 0;
                if (t->num_sets > t->num_set_heads && set_resize(t, t->num_set_heads * 2)) return UNKNOWN;
            }
            memcpy(set_bits(t, set), bits, size * sizeof *bits);
            set_link(t, set);
            t->refs[set] = 0;
        }
        t->refs[set]++;
    }
    t->memo_from = from; t->memo_to = set; t->memo_place = place; t->memo_on = on;
    return set;
}

/* -- entries ------------------------------------------------------------------------------------------------------- */

static u32 bucket(const Table *t, const u64 key[2]) {
    u32 mixed = (u32)((key[0] * t->mix[0] + key[1] * t->mix[1]) >> 32), place = mixed & (2 * t->half - 1);
    return place < t->num_heads ? place : mixed & (t->half - 1);
}

static u32 find_in(const Table *t, u32 place, const u64 key[2]) {
    u32 id = t->heads[place];
    while (id && (t->entries[id].key[0] != key[0] || t->entries[id].key[1] != key[1])) id = t->entries[id].next;
    return id;
}

static u32 find(const Table *t, const u64 key[2]) { return find_in(t, bucket(t, key), key); }

/* One bucket more: the blocks of one bucket are shared between it and the new one. */
static int split(Table *t) {
    if (grow((void **)&t->heads, &t->cap_heads, t->num_heads + 1, sizeof *t->heads)) return -1;
    u32 fresh = t->num_heads++, id;
    if (t->num_heads > 2 * t->half) t->half *= 2;
    u32 old = fresh - t->half;
    if (old + AHEAD < t->num_heads) __builtin_prefetch(t->entries + t->heads[old + AHEAD]); /* for a later split */
    id = t->heads[old]; t->heads[old] = t->heads[fresh] = 0;
    while (id) {
        u32 next = t->entries[id].next, *head = &t->heads[bucket(t, t->entries[id].key)];
        t->entries[id].next = *head; *head = id;
        id = next;
    }
    return 0;
}

static u32 obtain(Table *t, const u64 key[2]) {
    u32 id = find(t, key);
    if (id) return id;
    if (t->num_live >= t->num_heads && split(t)) return UNKNOWN;
    if ((id = t->free_entry)) t->free_entry = t->entries[id].next;
    else {
        if (grow((void **)&t->entries, &t->cap_entries, t->num_entries + 1, sizeof *t->entries)) return UNKNOWN;
        id = t->num_entries++;
    }
    u32 *head = &t->heads[bucket(t, key)];
    t->entries[id] = (Entry){.key = {key[0], key[1]}, .parent = UNKNOWN, .next = *head};
    *head = id; t->num_live++;
    return id;
}

static void adopt(Table *t, u32 id, u32 parent) {
    Entry *e = t->entries + id;
    if (e->parent != UNKNOWN || parent == id) return; /* a hash has one parent: the first that was told stays */
    e->parent = parent;
    if (parent == ROOT) return;
    e->left = 0; e->right = t->entries[parent].child;
    if (e->right) t->entries[e->right].left = id;
    t->entries[parent].child = id;
}

/* Frees an entry that nobody holds and that has no children, and then perhaps its parent. */
static void forget(Table *t, u32 id) {
    while (id != ROOT && id != UNKNOWN && t->entries[id].set == 0 && t->entries[id].child == 0) {
        Entry *e = t->entries + id;
        u32 parent = e->parent, *link = &t->heads[bucket(t, e->key)];
        if (parent != ROOT && parent != UNKNOWN) {
            if (e->left) t->entries[e->left].right = e->right;
            else t->entries[parent].child = e->right;
            if (e->right) t->entries[e->right].left = e->left;
        }
        while (*link != id) link = &t->entries[*link].next;
        *link = e->next;
        e->next = t->free_entry; t->free_entry = id; t->num_live--;
        id = parent;
    }
}

/* -- expectations: (worker, block) -> until, and what ends when ---------------------------------------------------- */

static u64 until_key(u32 slot, u32 id) { return ((u64)slot << 32 | id) + 1; }
static u32 until_home(const Table *t, u64 key) { return (u32)(key * t->mix[1] >> 32) & (t->cap_untils - 1); }

static Until *until_of(const Table *t, u32 slot, u32 id) {
    if (!t->num_untils) return NULL;
    u64 key = until_key(slot, id);
    for (u32 i = until_home(t, key); t->untils[i].key; i = (i + 1) & (t->cap_untils - 1))
        if (t->untils[i].key == key) return t->untils + i;
    return NULL;
}

static int until_add(Table *t, u32 slot, u32 id, double until) {
    if (t->num_untils * 2 >= t->cap_untils) {
        u32 old_cap = t->cap_untils;
        Until *old = t->untils, *larger = calloc(old_cap ? (size_t)old_cap * 2 : 1024, sizeof *larger);
        if (!larger) return -1;
        t->untils = larger; t->cap_untils = old_cap ? old_cap * 2 : 1024;
        for (u32 i = 0; i < old_cap; i++) if (old[i].key) {
            u32 place = until_home(t, old[i].key);
            while (t->untils[place].key) place = (place + 1) & (t->cap_untils - 1);
            t->untils[place] = old[i];
        }
        free(old);
    }
    u32 place = until_home(t, until_key(slot, id));
    while (t->untils[place].key) place = (place + 1) & (t->cap_untils - 1);
    t->untils[place] = (Until){until_key(slot, id), until};
    t->num_untils++;
    return 0;
}

static void until_remove(Table *t, Until *gone) {
    u32 mask = t->cap_untils - 1, hole = (u32)(gone - t->untils);
    for (u32 i = (hole + 1) & mask; t->untils[i].key; i = (i + 1) & mask) {
        u32 home = until_home(t, t->untils[i].key);
        if (((i - home) & mask) >= ((i - hole) & mask)) { t->untils[hole] = t->untils[i]; hole = i; }
    }
    t->untils[hole].key = 0; t->num_untils--;
}

static void batch_down(Table *t, u32 i) {
    for (u32 c; (c = 2 * i + 1) < t->num_batches; i = c) {
        if (c + 1 < t->num_batches && t->batches[c + 1].until < t->batches[c].until) c++;
        if (t->batches[i].until <= t->batches[c].until) return;
        Batch swapped = t->batches[i]; t->batches[i] = t->batches[c]; t->batches[c] = swapped;
    }
}

static int batch_push(Table *t, Batch batch) {
    if (grow((void **)&t->batches, &t->cap_batches, t->num_batches + 1, sizeof batch)) return -1;
    u32 i = t->num_batches++;
    for (; i && t->batches[(i - 1) / 2].until > batch.until; i = (i - 1) / 2) t->batches[i] = t->batches[(i - 1) / 2];
    t->batches[i] = batch;
    return 0;
}

/* -- who holds what ------------------------------------------------------------------------------------------------ */

static void note_regular(Table *t, u32 slot, u32 view) {
    u64 bit = 1ull << (slot % 64), *word = t->irregular[view] + slot / 64;
    int irregular = t->workers[slot].orphans[view] || t->workers[slot].unsure[view];
    if (irregular == !!(*word & bit)) return;
    *word ^= bit;
}

/* How many children of a block the worker holds. */
static u32 held_children(Table *t, u32 slot, u32 id, u32 view) {
    u32 held = 0, looked = 0;
    for (u32 c = t->entries[id].child; c; c = t->entries[c].right) {
        if (++looked > MAX_CHILDREN) { t->workers[slot].unsure[view] = 1; break; }
        held += has(t, t->entries[c].set, slot, view);
    }
    return held;
}

static int is_orphan(const Table *t, u32 slot, u32 id, u32 view) {
    u32 parent = t->entries[id].parent;
    return parent != ROOT && (parent == UNKNOWN || !has(t, t->entries[parent].set, slot, view));
}

static int compact(Table *t, Worker *w, u32 slot) {
    unsigned char *seen = calloc(t->num_entries / 8 + 1, 1);
    if (!seen) return -1;
    u32 kept = 0;
    for (u32 i = 0; i < w->num_ids; i++) {
        u32 id = w->ids[i];
        if (seen[id / 8] >> (id % 8) & 1 || !has(t, t->entries[id].set, slot, ANYWHERE)) continue;
        seen[id / 8] |= (unsigned char)(1 << (id % 8));
        w->ids[kept++] = id;
    }
    w->num_ids = kept;
    free(seen);
    return 0;
}

/* Counts orphans anew: `before` the set of a block changes, which a worker comes to hold (`on`) or loses, and after. */
static void recount_before(Table *t, u32 slot, u32 id, u32 view, int on) {
    u32 *orphans = t->workers[slot].orphans + view;
    if (!on) *orphans -= is_orphan(t, slot, id, view);
    else if (*orphans) *orphans -= held_children(t, slot, id, view); /* without orphans, no child is held */
}

static void recount_after(Table *t, u32 slot, u32 id, u32 view, int on) {
    t->workers[slot].orphans[view] += on ? (u32)is_orphan(t, slot, id, view) : held_children(t, slot, id, view);
    note_regular(t, slot, view);
}

/* A worker holds a block in a tier from now on, or does not any more. -1 without memory for a set. */
static inline __attribute__((always_inline)) int change(Table *t, u32 slot, u32 id, u32 tier, int on) {
    Worker *w = t->workers + slot;
    u32 before = t->entries[id].set, set = set_changed(t, before, slot, tier, on);
    if (set == UNKNOWN) return -1;
    int anywhere = t->tiers == 1 || !has_in(t, before, slot, !tier), on_device = w->tiered && tier == DEVICE;
    if (anywhere) recount_before(t, slot, id, ANYWHERE, on);
    if (on_device) recount_before(t, slot, id, ON_DEVICE, on);
    t->entries[id].set = set;
    set_drop(t, before);
    if (anywhere) recount_after(t, slot, id, ANYWHERE, on);
    if (on_device) recount_after(t, slot, id, ON_DEVICE, on);
    if (!anywhere) return 0;
    if (!on) { w->live--; forget(t, id); return 0; }
    w->live++;
    if (w->num_ids > 2 * w->live + 1024 && compact(t, w, slot)) return -1;
    if (grow((void **)&w->ids, &w->cap, w->num_ids + 1, sizeof *w->ids)) return -1;
    w->ids[w->num_ids++] = id;
    return 0;
}

static int hold(Table *t, u32 slot, u32 id, u32 tier) { return change(t, slot, id, tier, 1); }

/* Without memory for a set the block stays, which costs a detour. */
static void release(Table *t, u32 slot, u32 id, u32 tier) { (void)change(t, slot, id, tier, 0); }

/* Does the worker have the block on its device, by its own word? */
static int told_device(const Table *t, u32 slot, u32 id) {
    return has_in(t, t->entries[id].set, slot, DEVICE) && !until_of(t, slot, id);
}

/* From now on what the worker has on its device is counted apart: until now that was all it had. */
static void part_tiers(Table *t, u32 slot) {
    Worker *w = t->workers + slot;
    if (w->tiered) return;
    w->tiered = 1;
    t->tiered[slot / 64] |= 1ull << (slot % 64);
    w->orphans[ON_DEVICE] = w->orphans[ANYWHERE]; w->unsure[ON_DEVICE] = w->unsure[ANYWHERE];
    note_regular(t, slot, ON_DEVICE);
}

/* -- what table.py calls ------------------------------------------------------------------------------------------- */

void table_free(Table *t) {
    if (!t) return;
    for (u32 i = 0; i < MAX_WORDS * 64; i++) free(t->workers[i].ids);
    for (u32 i = 0; i < t->num_batches; i++) free(t->batches[i].ids);
    free(t->entries); free(t->heads); free(t->bits); free(t->refs); free(t->set_next); free(t->set_heads);
    free(t->untils); free(t->batches); free(t);
}

Table *table_new(u64 first, u64 second) {
    Table *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->mix[0] = first | 1; t->mix[1] = second | 1;
    t->half = 1; t->num_entries = 1;
    shape(t, 1, 1);
    if (grow((void **)&t->entries, &t->cap_entries, 1, sizeof *t->entries)
        || grow((void **)&t->heads, &t->cap_heads, 1, sizeof *t->heads) || sets_grow(t, 1) || set_resize(t, 64)) {
        table_free(t);
        return NULL;
    }
    t->heads[0] = 0; t->num_heads = 1;
    t->bits[0] = 0; t->refs[0] = 1; t->num_sets = 1;
    return t;
}

int table_store(Table *t, u32 slot, u32 tier, const u64 *keys, u32 num, const u64 *parent) {
    if (sets_widen(t, slot, tier)) return -1;
    if (tier == HOST) part_tiers(t, slot);
    Worker *w = t->workers + slot;
    u32 above = num && parent ? obtain(t, parent) : ROOT;
    if (above == UNKNOWN) return -1;
    for (u32 i = 0; i < num; i++) {
        if (i + AHEAD < num) __builtin_prefetch(t->heads + bucket(t, keys + 2 * (i + AHEAD)));
        if (i + AHEAD / 2 < num) __builtin_prefetch(t->entries + t->heads[bucket(t, keys + 2 * (i + AHEAD / 2))]);
        u32 id = obtain(t, keys + 2 * i);
        if (id == UNKNOWN) return -1;
        adopt(t, id, above);
        above = id;
        int known = 0; /* in the other tier */
        if (t->tiers > 1) known = tier == HOST ? told_device(t, slot, id) : has_in(t, t->entries[id].set, slot, HOST);
        if (has_in(t, t->entries[id].set, slot, tier)) {
            Until *expected = tier == DEVICE ? until_of(t, slot, id) : NULL;
            if (!expected) continue;
            until_remove(t, expected);
        } else if (hold(t, slot, id, tier)) return -1;
        w->hosted += tier == HOST;
        w->held += !known;
    }
    if (num && parent) forget(t, find(t, parent)); /* the first block may have had another parent */
    return 0;
}

void table_remove(Table *t, u32 slot, u32 tier, const u64 *keys, u32 num) {
    if (slot >= t->words * 64) return;
    for (u32 i = 0; i < num; i++) {
        u32 id = find(t, keys + 2 * i);
        if (!id || !has_in(t, t->entries[id].set, slot, tier)) continue;
        Until *expected = tier == DEVICE ? until_of(t, slot, id) : NULL;
        int known = tier == HOST ? told_device(t, slot, id) : has_in(t, t->entries[id].set, slot, HOST);
        t->workers[slot].hosted -= tier == HOST;
        if (expected) until_remove(t, expected);
        else t->workers[slot].held -= !known;
        release(t, slot, id, tier);
    }
}

void table_clear(Table *t, u32 slot) {
    Worker *w = t->workers + slot;
    for (u32 i = 0; i < w->num_ids; i++) {
        u32 id = w->ids[i];
        if (!has(t, t->entries[id].set, slot, ANYWHERE)) continue;
        Until *expected = until_of(t, slot, id);
        if (expected) until_remove(t, expected);
        for (u32 tier = DEVICE; tier < t->tiers; tier++) {
            u32 before = t->entries[id].set, set = before;
            if (has_in(t, before, slot, tier)) set = set_changed(t, before, slot, tier, 0);
            if (set == before || set == UNKNOWN) continue;
            t->entries[id].set = set;
            set_drop(t, before);
        }
        forget(t, id);
    }
    free(w->ids);
    *w = (Worker){0};
    t->tiered[slot / 64] &= ~(1ull << (slot % 64));
    note_regular(t, slot, ANYWHERE); note_regular(t, slot, ON_DEVICE);
}

int table_expect(Table *t, u32 slot, const u64 *keys, u32 num, double until) {
    if (sets_widen(t, slot, DEVICE)) return -1;
    Batch batch = {until, slot, 0, malloc((num ? num : 1) * sizeof(u32))};
    u32 above = ROOT;
    if (!batch.ids) return -1;
    for (u32 i = 0; i < num; i++) {
        u32 id = obtain(t, keys + 2 * i);
        if (id == UNKNOWN) { free(batch.ids); return -1; }
        adopt(t, id, above);
        above = id;
        if (has_in(t, t->entries[id].set, slot, DEVICE)) {
            Until *expected = until_of(t, slot, id);
            if (!expected || expected->until >= until) continue; /* held, or expected for longer */
            expected->until = until;
        } else if (hold(t, slot, id, DEVICE) || until_add(t, slot, id, until)) { free(batch.ids); return -1; }
        batch.ids[batch.num++] = id;
    }
    if (batch.num) {
        u32 *fitting = realloc(batch.ids, batch.num * sizeof(u32));
        if (fitting) batch.ids = fitting;
        return batch_push(t, batch);
    }
    free(batch.ids);
    return 0;
}

void table_expire(Table *t, double now) {
    while (t->num_batches && t->batches[0].until <= now) {
        Batch due = t->batches[0];
        t->batches[0] = t->batches[--t->num_batches];
        batch_down(t, 0);
        for (u32 i = due.num; i--;) { /* the tail first, so that no child is left an orphan on the way */
            Until *expected = until_of(t, due.slot, due.ids[i]);
            if (!expected || expected->until > now) continue;
            until_remove(t, expected);
            release(t, due.slot, due.ids[i], DEVICE);
        }
        free(due.ids);
    }
}

typedef struct { u32 *slots, *depths, num; } Found;

static void ended(const Table *t, const u64 *bits, u32 depth, Found *found) {
    for (u32 word = 0; word < t->words; word++)
        for (u64 left = bits[word]; left; left &= left - 1) {
            found->slots[found->num] = word * 64 + (u32)__builtin_ctzll(left);
            found->depths[found->num++] = depth;
        }
}

/* Workers whose blocks may have holes: block after block, until none is left. */
static void walk(const Table *t, const u64 *keys, u32 num, u32 view, u64 *alive, Found *found) {
    u32 places[AHEAD];
    for (u32 i = 0; i < num; i++) {
        if (i % AHEAD == 0) {
            u32 many = num - i < AHEAD ? num - i : AHEAD;
            for (u32 j = 0; j < many; j++) {
                places[j] = bucket(t, keys + 2 * (i + j));
                __builtin_prefetch(t->heads + places[j]);
            }
            for (u32 j = 0; j < many; j++) __builtin_prefetch(t->entries + t->heads[places[j]]);
        }
        u32 id = find_in(t, places[i % AHEAD], keys + 2 * i), set = id ? t->entries[id].set : 0;
        u64 gone[MAX_WORDS], left = 0;
        for (u32 k = 0; k < t->words; k++) {
            u64 bits = word_of(t, set, k, view);
            gone[k] = alive[k] & ~bits; alive[k] &= bits; left |= alive[k];
        }
        if (i) ended(t, gone, i, found);
        if (!left) return;
    }
    ended(t, alive, num, found);
}

/* Workers without holes. Whoever is in the set of one place of the chain, not in that of a later one, ends between. */
static void bisect(const Table *t, const u64 *keys, u32 num, u32 view, const u64 *among, u32 one, Found *found) {
    u64 alive[MAX_WORDS];
    struct { u32 low, high, low_set, high_set; } todo[40];
    u32 last = num > 1 ? find(t, keys + 2 * (num - 1)) : 0, depth = 0;
    u32 end = num == 1 ? one : last ? t->entries[last].set : 0;
    for (u32 k = 0; k < t->words; k++) alive[k] = word_of(t, end, k, view) & among[k];
    ended(t, alive, num, found);
    todo[depth].low = 0; todo[depth].high = num - 1; todo[depth].low_set = one; todo[depth++].high_set = end;
    while (depth--) {
        u32 low = todo[depth].low, high = todo[depth].high, low_set = todo[depth].low_set;
        u32 high_set = todo[depth].high_set;
        if (low_set == high_set) continue;
        u64 differ = 0;
        for (u32 k = 0; k < t->words; k++) {
            alive[k] = word_of(t, low_set, k, view) & ~word_of(t, high_set, k, view) & among[k];
            differ |= alive[k];
        }
        if (!differ) continue;
        if (high - low == 1) { ended(t, alive, high, found); continue; }
        u32 middle = low + (high - low) / 2, id = find(t, keys + 2 * middle), set = id ? t->entries[id].set : 0;
        todo[depth].low = middle; todo[depth].high = high; todo[depth].low_set = set; todo[depth++].high_set = high_set;
        todo[depth].low = low; todo[depth].high = middle; todo[depth].low_set = low_set; todo[depth++].high_set = set;
    }
}

/* How deep workers hold the chain, of those in `among` (all: NULL) that hold its first block, which is in set `one`. */
static void measure(const Table *t, const u64 *keys, u32 num, u32 view, const u64 *among, u32 one, Found *found) {
    u64 regular[MAX_WORDS], holed[MAX_WORDS], some = 0;
    for (u32 k = 0; k < t->words; k++) {
        u64 asked = among ? among[k] : ~0ull;
        regular[k] = asked & ~t->irregular[view][k];
        some |= holed[k] = asked & t->irregular[view][k] & word_of(t, one, k, view);
    }
    bisect(t, keys, num, view, regular, one, found);
    if (some) walk(t, keys, num, view, holed, found);
}

/* Of the workers that were found, how many blocks of the chain those that use both tiers have on the device. Apart from
   the other function, for its arrays are large. */
__attribute__((noinline))
static void find_apart(const Table *t, const u64 *keys, u32 num, u32 one, const Found *found, u32 *apart) {
    u64 tiered[MAX_WORDS], some = 0;
    for (u32 k = 0; k < t->words; k++) some |= tiered[k] = word_of(t, one, k, ANYWHERE) & t->tiered[k];
    if (!some) return;
    u32 near_slots[MAX_WORDS * 64], near_depths[MAX_WORDS * 64], on_device[MAX_WORDS * 64];
    Found near = {near_slots, near_depths, 0};
    measure(t, keys, num, ON_DEVICE, tiered, one, &near);
    for (u32 i = 0; i < found->num; i++) on_device[found->slots[i]] = 0;
    for (u32 i = 0; i < near.num; i++) on_device[near_slots[i]] = near_depths[i];
    for (u32 i = 0; i < found->num; i++) {
        u32 slot = found->slots[i];
        if (!(tiered[slot / 64] >> (slot % 64) & 1) || on_device[slot] >= found->depths[i]) continue;
        apart[2 * apart[0] + 1] = slot; apart[2 * apart[0] + 2] = on_device[slot]; apart[0]++;
    }
}

/* Workers that hold at least one block of the chain, and how many from its beginning; returns how many workers. `into`
   has room for as many slots as there can be, then for as many depths. After these: of how many workers not all of these
   blocks are on the device, then the slot of each and how many are; if there are such, APART is added to the result. */
u32 table_match(const Table *t, const u64 *keys, u32 num, u32 *into) {
    Found found = {into, into + MAX_WORDS * 64, 0};
    u32 first = num ? find(t, keys) : 0, *apart = into + 2 * MAX_WORDS * 64;
    if (!first || !t->entries[first].set) return 0;
    u32 one = t->entries[first].set;
    measure(t, keys, num, ANYWHERE, NULL, one, &found);
    if (t->tiers == 1) return found.num;
    apart[0] = 0;
    find_apart(t, keys, num, one, &found, apart);
    return apart[0] ? found.num | APART : found.num;
}

u32 table_held(const Table *t, u32 slot) { return t->workers[slot].held; }
u32 table_hosted(const Table *t, u32 slot) { return t->workers[slot].hosted; }
u32 table_entries(const Table *t) { return t->num_live; }

static int listed(const Table *t, u32 slot, u32 id, u32 tier) {
    return tier == DEVICE ? told_device(t, slot, id) : has_in(t, t->entries[id].set, slot, tier);
}

/* A worker's blocks in a tier as chains, parents first. `keys` has room for all it holds, `parents` (a key each) for as
   many chains, `starts` for one more: where the last one ends. A chain at the root has a parent of zeros. Returns the
   number of chains, or UNKNOWN. */
u32 table_export(Table *t, u32 slot, u32 tier, u64 *keys, u32 *starts, u64 *parents) {
    Worker *w = t->workers + slot;
    unsigned char *seen = calloc(t->num_entries / 8 + 1, 1);
    u32 *path = malloc((w->live + 1) * sizeof *path), chains = 0, num = 0, last = UNKNOWN;
    if (!seen || !path) { free(seen); free(path); return UNKNOWN; }
    for (u32 i = 0; i < w->num_ids; i++) {
        u32 length = 0, id = w->ids[i];
        while (id != ROOT && id != UNKNOWN && !(seen[id / 8] >> (id % 8) & 1) && listed(t, slot, id, tier)) {
            seen[id / 8] |= (unsigned char)(1 << (id % 8));
            path[length++] = id;
            id = t->entries[id].parent;
        }
        if (!length) continue;
        static const u64 none[2];
        if (!chains || id != last) { /* else it continues what was listed before it */
            starts[chains] = num;
            memcpy(parents + 2 * chains++, id == ROOT || id == UNKNOWN ? none : t->entries[id].key, sizeof none);
        }
        last = path[0];
        while (length) memcpy(keys + 2 * (u64)num++, t->entries[path[--length]].key, sizeof none);
    }
    starts[chains] = num;
    free(seen); free(path);
    return chains;
}

/* Orphans, and all blocks, of one worker in one view. */
static void recount(const Table *t, u32 slot, u32 view, u32 *held, u32 *orphans) {
    *held = *orphans = 0;
    for (u32 place = 0; place < t->num_heads; place++)
        for (u32 id = t->heads[place]; id; id = t->entries[id].next)
            if (has(t, t->entries[id].set, slot, view)) { ++*held; *orphans += is_orphan(t, slot, id, view); }
}

/* By its own word: blocks a worker holds, and of these, on its host. */
static void recount_told(const Table *t, u32 slot, u32 *held, u32 *hosted) {
    *held = *hosted = 0;
    for (u32 place = 0; place < t->num_heads; place++)
        for (u32 id = t->heads[place]; id; id = t->entries[id].next) {
            int on_host = has_in(t, t->entries[id].set, slot, HOST);
            *hosted += on_host; *held += on_host || told_device(t, slot, id);
        }
}

/* Every counter agrees with what it counts; the line of the first that does not, or 0. For tests. */
u32 table_check(const Table *t) {
    u32 live = 0, *counted = calloc(t->num_sets, sizeof *counted), wrong = 0;
    if (!counted) return __LINE__;
    for (u32 place = 0; place < t->num_heads && !wrong; place++)
        for (u32 id = t->heads[place]; id && !wrong; id = t->entries[id].next) {
            const Entry *e = t->entries + id;
            live++; counted[e->set]++;
            if (bucket(t, e->key) != place) wrong = __LINE__;
            if (!e->set && !e->child) wrong = __LINE__;
            if (e->child && t->entries[e->child].parent != id) wrong = __LINE__;
        }
    if (!wrong && live != t->num_live) wrong = __LINE__;
    for (u32 set = 1; set < t->num_sets && !wrong; set++) if (t->refs[set] != counted[set]) {
        u32 freed = t->free_set;
        while (freed && freed != set) freed = t->set_next[freed];
        if (!freed || counted[set]) wrong = __LINE__;
    }
    for (u32 slot = 0; slot < t->words * 64 && !wrong; slot++) {
        const Worker *w = t->workers + slot;
        u32 held, orphans, hosted;
        recount(t, slot, ANYWHERE, &held, &orphans);
        if (held != w->live) wrong = __LINE__;
        if (!w->unsure[ANYWHERE] && orphans != w->orphans[ANYWHERE]) wrong = __LINE__;
        recount_told(t, slot, &held, &hosted);
        if (held != w->held || hosted != w->hosted) wrong = __LINE__;
        if (hosted && !w->tiered) wrong = __LINE__;
        if (!w->tiered) continue;
        recount(t, slot, ON_DEVICE, &held, &orphans);
        if (!w->unsure[ON_DEVICE] && orphans != w->orphans[ON_DEVICE]) wrong = __LINE__;
    }
    free(counted);
    return wrong;
}
