/* An open-loop load generator: requests are sent at times fixed beforehand, whatever the server does.
 *
 *   openloop PORT RATE_PER_S SECONDS CONNECTIONS SEED FILE
 *
 * FILE holds requests, each behind its length in 4 bytes, little-endian; they are sent in turn, with Poisson
 * arrivals, one at a time on a connection. A latency counts from the moment at which the request should have been sent:
 * waiting for a free connection, or for the processor, counts against the server. Rate 0 is a closed loop: a request
 * leaves as soon as a connection is free. Prints one JSON object; `tenths` are the answers in each tenth of a second.
 *
 * In C, and as a real-time process where that is allowed, because databases of the run may share its core: it represents
 * clients on other machines, which a busy core here would not delay. It sleeps when there is nothing to do.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER_MAX = 65536, LATE_NS = 1000000, CLOSED_LOOP_MAX = 300000, SECOND_NS = 1000000000 };

typedef struct {
    int fd;
    int64_t due_ns; /* when the request in flight should have been sent; 0 when free */
    size_t filled;
    char answer[ANSWER_MAX];
} Connection;

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * SECOND_NS + at.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(2);
}

static uint64_t random_state;

static double next_random(void) { /* xorshift64*, in (0, 1] */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)((random_state * 2685821657736338717ULL >> 11) + 1) / 9007199254740992.0;
}

static int compare(const void *one, const void *other) {
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

/* 1 if the answer is complete, 0 if more bytes must come. */
static int is_complete(const Connection *connection) {
    const char *end = memmem(connection->answer, connection->filled, "\r\n\r\n", 4);
    if (end == NULL) return 0;
    for (const char *line = connection->answer; line < end; line++) {
        if (*line == '\n' && strncasecmp(line + 1, "content-length:", 15) == 0) {
            size_t length = (size_t)strtoul(line + 16, NULL, 10);
            return connection->filled >= (size_t)(end - connection->answer) + 4 + length;
        }
    }
    return 0;
}

int main(int count, char **values) {
    if (count != 7) {
        fprintf(stderr, "usage: openloop PORT RATE_PER_S SECONDS CONNECTIONS SEED FILE\n");
        return 2;
    }
    double rate = atof(values[2]), seconds = atof(values[3]);
    int connections = atoi(values[4]);
    random_state = strtoull(values[5], NULL, 10) * 0x9E3779B97F4A7C15ULL + 1;

    FILE *file = fopen(values[6], "rb");
    if (file == NULL) fail(values[6]);
    size_t requests = 0, room = 1024;
    char **bytes = malloc(room * sizeof *bytes);
    uint32_t *lengths = malloc(room * sizeof *lengths);
    unsigned char size[4];
    while (fread(size, 4, 1, file) == 1) {
        if (requests == room) {
            room *= 2;
            bytes = realloc(bytes, room * sizeof *bytes);
            lengths = realloc(lengths, room * sizeof *lengths);
        }
        lengths[requests] = size[0] | size[1] << 8 | size[2] << 16 | (uint32_t)size[3] << 24;
        bytes[requests] = malloc(lengths[requests]);
        if (fread(bytes[requests], lengths[requests], 1, file) != 1) fail("short file");
        requests++;
    }
    fclose(file);

    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(values[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int poller = epoll_create1(0);
    Connection *all = calloc((size_t)connections, sizeof *all);
    int *idle = malloc((size_t)connections * sizeof *idle), idles = 0; /* a stack of free connections */
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
        if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) fail("connect");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        all[i].fd = fd;
        idle[idles++] = i;
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
    }

    prctl(PR_SET_TIMERSLACK, 1UL);
    struct sched_param priority = {.sched_priority = 10};
    int is_real_time = sched_setscheduler(0, SCHED_FIFO, &priority) == 0;

    int is_closed_loop = rate <= 0;
    size_t expected = (size_t)((is_closed_loop ? CLOSED_LOOP_MAX : rate * 1.5) * seconds) + 1024;
    int64_t *latencies = malloc(expected * sizeof *latencies), *due = malloc(expected * sizeof *due);
    size_t arrived = 0, started = 0, answered = 0, errors = 0, late = 0;
    int64_t next_ns = now_ns() + 10000000, end_ns = next_ns + (int64_t)(seconds * 1e9);
    int64_t began_ns = next_ns, give_up_ns = end_ns + 10LL * SECOND_NS;
    size_t tenths = (size_t)(seconds * 10), *answers = calloc(tenths + 1, sizeof *answers);
    struct epoll_event ready[256];
    for (;;) {
        int64_t moment = now_ns();
        int was_waiting = started < arrived;
        if (is_closed_loop) {
            if (moment >= end_ns) next_ns = end_ns;
            for (int i = 0; i < idles && next_ns < end_ns && arrived < expected; i++) due[arrived++] = moment;
        }
        while (!is_closed_loop && next_ns <= moment && next_ns < end_ns && arrived < expected) {
            due[arrived++] = next_ns;
            next_ns += (int64_t)(-log(next_random()) / rate * 1e9);
        }
        while (started < arrived && idles > 0) {
            Connection *connection = &all[idle[--idles]];
            size_t number = started % requests;
            if (!was_waiting && moment - due[started] > LATE_NS) late++;
            connection->due_ns = due[started++];
            connection->filled = 0;
            if (send(connection->fd, bytes[number], lengths[number], MSG_NOSIGNAL) != (ssize_t)lengths[number])
                fail("send");
        }
        if (next_ns >= end_ns && started == arrived && idles == connections) break;
        if (moment > give_up_ns) {
            errors += arrived - answered;
            break;
        }
        int64_t until_ns = next_ns < end_ns && !is_closed_loop ? next_ns - now_ns() : SECOND_NS / 10;
        if (until_ns < 0) until_ns = 0;
        struct timespec timeout = {.tv_sec = until_ns / SECOND_NS, .tv_nsec = until_ns % SECOND_NS};
        int found = epoll_pwait2(poller, ready, 256, &timeout, NULL);
        for (int i = 0; i < found; i++) {
            Connection *connection = &all[ready[i].data.u32];
            ssize_t got = recv(connection->fd, connection->answer + connection->filled,
                               ANSWER_MAX - connection->filled, 0);
            if (got <= 0) {
                if (got < 0 && errno == EAGAIN) continue;
                fprintf(stderr, "the server closed a connection\n");
                return 2;
            }
            connection->filled += (size_t)got;
            if (!is_complete(connection)) continue;
            int64_t answered_ns = now_ns();
            size_t tenth = (size_t)((answered_ns - began_ns) / (SECOND_NS / 10));
            if (answered_ns >= began_ns && tenth < tenths) answers[tenth]++;
            latencies[answered++] = answered_ns - connection->due_ns;
            if (strncmp(connection->answer, "HTTP/1.1 200", 12) != 0) errors++;
            connection->due_ns = 0;
            idle[idles++] = (int)ready[i].data.u32;
        }
    }
    if (answered == 0) return 2;
    qsort(latencies, answered, sizeof *latencies, compare);
    double ms = 1e6;
    printf("{\"sent\": %zu, \"errors\": %zu, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"p999_ms\": %.3f, \"max_ms\": %.3f, "
           "\"sent_late\": %.6f, \"is_real_time\": %s, \"tenths\": [",
           started, errors, latencies[answered / 2] / ms, latencies[(size_t)(answered * 0.99)] / ms,
           latencies[(size_t)(answered * 0.999)] / ms, latencies[answered - 1] / ms, (double)late / started,
           is_real_time ? "true" : "false");
    for (size_t i = 0; i < tenths; i++) printf(i == 0 ? "%zu" : ", %zu", answers[i]);
    printf("]}\n");
    return 0;
}
