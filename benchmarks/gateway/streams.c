/* Reads answers that are streamed, and counts their events: as little as a client can do, so that the one who is measured
   is not held up by the one who measures. It looks once in a millisecond: a client elsewhere is not woken by the sender's
   processor either, with every event. See benchmarks/gateway/router.py. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ROOM 65536

static const char WORD[] = "data: ", END[] = "0\r\n\r\n";

typedef struct { char tail[8]; int num_tail; } Stream;

/* Reads from `num` connections until each has had its end, for at most `timeout_ms` without a word from any. The events
   that were counted; -1 when one ended without an end, -2 when nothing came, -3 without memory. */
int64_t streams_read(const int *fds, int num, int timeout_ms) {
    int epoll = epoll_create1(EPOLL_CLOEXEC), left = num;
    Stream *streams = calloc((size_t)num, sizeof *streams);
    char *bytes = malloc(ROOM + sizeof streams->tail);
    struct epoll_event ready[256];
    int64_t events = epoll < 0 || !streams || !bytes ? -3 : 0;
    for (int i = 0; i < num && !events; i++) {
        struct epoll_event wanted = { .events = EPOLLIN, .data.u32 = (uint32_t)i };
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &wanted)) events = -3;
    }
    for (int silent_ms = 0; left && events >= 0;) {
        int count = epoll_wait(epoll, ready, 256, 0);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 || silent_ms > timeout_ms) events = -2;
        if (count < 256) nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        silent_ms = count ? 0 : silent_ms + 1;
        for (int r = 0; r < count && events >= 0; r++) {
            Stream *s = streams + ready[r].data.u32;
            memcpy(bytes, s->tail, (size_t)s->num_tail);
            ssize_t got = recv(fds[ready[r].data.u32], bytes + s->num_tail, ROOM, MSG_DONTWAIT);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (got <= 0) { events = -1; break; }
            size_t size = (size_t)s->num_tail + (size_t)got, word = sizeof WORD - 1, end = sizeof END - 1;
            size_t longest = word > end ? word : end;
            char *at = bytes, *last = bytes;
            while ((at = memmem(at, (size_t)(bytes + size - at), WORD, word))) { events++; at += word; last = at; }
            if (size >= end && !memcmp(bytes + size - end, END, end)) {
                epoll_ctl(epoll, EPOLL_CTL_DEL, fds[ready[r].data.u32], NULL);
                left--;
            }
            size_t kept = (size_t)(bytes + size - last); /* the beginning of a word, or of the end, may be among them */
            if (kept >= longest) kept = longest - 1;
            memcpy(s->tail, bytes + size - kept, kept);
            s->num_tail = (int)kept;
        }
    }
    if (epoll >= 0) close(epoll);
    free(streams); free(bytes);
    return events;
}
