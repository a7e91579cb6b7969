/* A load generator for unary gRPC: open loop at a rate, or closed loop as fast as the server answers.
 *
 *   openloop_grpc PORT RATE_PER_S SECONDS CONNECTIONS STREAMS SEED PATH FILE
 *
 * FILE holds messages, each behind its length in 4 bytes, little-endian; they are sent in turn. With a rate, calls
 * are sent at times fixed beforehand (Poisson arrivals), whatever the server does, and a latency counts from the moment at
 * which the call should have been sent: waiting for a free stream, or for the processor, counts against the server. With
 * rate 0 all streams are kept busy. Prints one JSON object.
 *
 * Header blocks use literals without indexing only: every call of a connection has the same block, and no server has
 * to keep a table. Windows for answers are opened wide once; the server's windows are far larger than what is sent
 * before it refills them.
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
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { IN_MAX = 1 << 18, OUT_MAX = 1 << 18, STREAMS_MAX = 16384, LATE_NS = 1000000, SECOND_NS = 1000000000 };

typedef struct {
    uint32_t id; /* 0 when free */
    int64_t due_ns;
} Stream;

typedef struct {
    int fd;
    uint32_t next_id;
    int open;
    Stream streams[STREAMS_MAX]; /* by (id / 2) % STREAMS_MAX */
    size_t filled, pending;
    unsigned char in[IN_MAX], out[OUT_MAX];
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

static void put(Connection *connection, const void *data, size_t size) {
    if (connection->pending + size > OUT_MAX) {
        fprintf(stderr, "the server does not read\n");
        exit(2);
    }
    memcpy(connection->out + connection->pending, data, size);
    connection->pending += size;
}

static void put_frame(Connection *connection, int kind, int flags, uint32_t id, const void *data, size_t size) {
    unsigned char head[9] = {size >> 16, size >> 8, size, kind, flags, id >> 24, id >> 16, id >> 8, id};
    put(connection, head, 9);
    put(connection, data, size);
}

static void flush(Connection *connection) {
    size_t sent = 0;
    while (sent < connection->pending) {
        ssize_t size = write(connection->fd, connection->out + sent, connection->pending - sent);
        if (size < 0 && errno == EAGAIN) break;
        if (size < 0) fail("write");
        sent += (size_t)size;
    }
    memmove(connection->out, connection->out + sent, connection->pending - sent);
    connection->pending -= sent;
}

static unsigned char block[1024];
static size_t block_size;

static void literal(int index, const char *name, const char *value) { /* without indexing */
    if (index < 15) {
        block[block_size++] = (unsigned char)index;
    } else {
        block[block_size++] = 0x0f;
        block[block_size++] = (unsigned char)(index - 15);
    }
    if (index == 0) {
        block[block_size++] = (unsigned char)strlen(name);
        memcpy(block + block_size, name, strlen(name));
        block_size += strlen(name);
    }
    block[block_size++] = (unsigned char)strlen(value);
    memcpy(block + block_size, value, strlen(value));
    block_size += strlen(value);
}

int main(int count, char **values) {
    if (count != 9) {
        fprintf(stderr, "usage: openloop_grpc PORT RATE_PER_S SECONDS CONNECTIONS STREAMS SEED PATH FILE\n");
        return 2;
    }
    double rate = atof(values[2]), seconds = atof(values[3]);
    int connections = atoi(values[4]), streams_max = atoi(values[5]);
    random_state = strtoull(values[6], NULL, 10) * 0x9E3779B97F4A7C15ULL + 1;
    block[block_size++] = 0x83; /* :method POST */
    block[block_size++] = 0x86; /* :scheme http */
    literal(4, NULL, values[7]);
    literal(1, NULL, "localhost");
    literal(31, NULL, "application/grpc");
    literal(0, "te", "trailers");
    literal(0, "grpc-timeout", "20S");

    FILE *file = fopen(values[8], "rb");
    if (file == NULL) fail(values[8]);
    size_t messages = 0, room = 1024;
    unsigned char **bytes = malloc(room * sizeof *bytes);
    uint32_t *lengths = malloc(room * sizeof *lengths);
    unsigned char size[4];
    while (fread(size, 4, 1, file) == 1) {
        if (messages == room) {
            room *= 2;
            bytes = realloc(bytes, room * sizeof *bytes);
            lengths = realloc(lengths, room * sizeof *lengths);
        }
        uint32_t length = size[0] | size[1] << 8 | size[2] << 16 | (uint32_t)size[3] << 24;
        unsigned char *message = malloc(length + 5);
        unsigned char prefix[5] = {0, length >> 24, length >> 16, length >> 8, length};
        memcpy(message, prefix, 5);
        if (fread(message + 5, length, 1, file) != 1) fail("short file");
        bytes[messages] = message;
        lengths[messages++] = length + 5;
    }
    fclose(file);

    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(values[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int poller = epoll_create1(0);
    Connection *all = calloc((size_t)connections, sizeof *all);
    for (int i = 0; i < connections; i++) {
        Connection *connection = &all[i];
        connection->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(connection->fd, (struct sockaddr *)&address, sizeof address) != 0) fail("connect");
        int one = 1;
        setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(connection->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        epoll_ctl(poller, EPOLL_CTL_ADD, connection->fd, &event);
        connection->next_id = 1;
        static const unsigned char window[6] = {0, 4, 0x7f, 0xff, 0xff, 0xff}, more[4] = {0x7f, 0xff, 0, 0};
        put(connection, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
        put_frame(connection, 4, 0, 0, window, 6);
        put_frame(connection, 8, 0, 0, more, 4);
        flush(connection);
    }
    /* Before everything else on this core, where that is allowed: it represents clients on other machines. */
    struct sched_param first = {.sched_priority = 1};
    int is_real_time = sched_setscheduler(0, SCHED_FIFO, &first) == 0;
    prctl(PR_SET_TIMERSLACK, 1000UL);

    size_t capacity = rate > 0 ? (size_t)(rate * seconds * 1.2) + 1000 : 20000000, answered = 0;
    int64_t *latencies = malloc(capacity * sizeof *latencies);
    size_t sent = 0, late = 0, errors = 0;
    int64_t begin = now_ns(), end = begin + (int64_t)(seconds * SECOND_NS), due = begin, last = end + 5LL * SECOND_NS;
    int turn = 0, in_flight = 0;
    for (;;) {
        int64_t now = now_ns();
        int is_sending = rate > 0 ? due < end : now < end;
        if ((!is_sending && in_flight == 0) || now > last) break;
        while (is_sending && (rate <= 0 || due <= now) && sent < capacity) {
            Connection *connection = NULL;
            for (int i = 0; i < connections && connection == NULL; i++) {
                Connection *candidate = &all[(turn + i) % connections];
                int is_free = candidate->streams[candidate->next_id / 2 % STREAMS_MAX].id == 0;
                if (is_free && candidate->open < streams_max && candidate->pending < OUT_MAX / 2)
                    connection = candidate;
            }
            if (connection == NULL) break;
            turn = (int)(connection - all) + (rate > 0);
            uint32_t id = connection->next_id;
            connection->next_id += 2;
            Stream *stream = &connection->streams[id / 2 % STREAMS_MAX];
            stream->id = id;
            stream->due_ns = rate > 0 ? due : now;
            put_frame(connection, 1, 4, id, block, block_size);
            put_frame(connection, 0, 1, id, bytes[sent % messages], lengths[sent % messages]);
            connection->open++;
            in_flight++;
            sent++;
            if (rate > 0) {
                if (now - due > LATE_NS && connection->open == 1) late++;
                due += (int64_t)(-log(next_random()) / rate * SECOND_NS);
                is_sending = due < end;
            }
        }
        for (int i = 0; i < connections; i++)
            if (all[i].pending) flush(&all[i]);
        struct timespec wait = {0, 0};
        int64_t pause = is_sending && rate > 0 && due > now ? due - now : is_sending && rate > 0 ? 50000 : 10000000;
        wait.tv_nsec = pause < 999999999 ? pause : 999999999;
        struct epoll_event events[64];
        int ready = epoll_pwait2(poller, events, 64, &wait, NULL);
        for (int i = 0; i < ready; i++) {
            Connection *connection = events[i].data.ptr;
            ssize_t got = read(connection->fd, connection->in + connection->filled, IN_MAX - connection->filled);
            if (got == 0) {
                fprintf(stderr, "the server closed a connection\n");
                exit(2);
            }
            if (got < 0) continue;
            connection->filled += (size_t)got;
            int64_t arrived = now_ns();
            size_t at = 0;
            while (connection->filled - at >= 9) {
                unsigned char *frame = connection->in + at;
                size_t length = (size_t)frame[0] << 16 | (size_t)frame[1] << 8 | frame[2];
                if (connection->filled - at < 9 + length) break;
                int kind = frame[3], flags = frame[4];
                uint32_t id = ((uint32_t)frame[5] & 0x7f) << 24 | (uint32_t)frame[6] << 16 | frame[7] << 8 | frame[8];
                if (kind == 4 && !(flags & 1)) put_frame(connection, 4, 1, 0, "", 0);
                if (kind == 6 && !(flags & 1)) put_frame(connection, 6, 1, 0, frame + 9, 8);
                if (kind == 7) errors++;
                if (kind == 3 || (kind == 1 && flags & 1)) {
                    Stream *stream = &connection->streams[id / 2 % STREAMS_MAX];
                    if (kind == 3 && stream->id != id) { /* a reset after an answer */
                        at += 9 + length;
                        continue;
                    }
                    if (stream->id != id) fail("an answer to no call");
                    /* A failed call is one HEADERS with the status in it. */
                    if (kind == 3 || length > 60) errors++;
                    latencies[answered++] = arrived - stream->due_ns;
                    stream->id = 0;
                    connection->open--;
                    in_flight--;
                }
                at += 9 + length;
            }
            memmove(connection->in, connection->in + at, connection->filled - at);
            connection->filled -= at;
        }
    }
    double took_s = (double)(now_ns() - begin) / SECOND_NS;
    errors += sent - answered;
    if (answered == 0) {
        fprintf(stderr, "no answers\n");
        return 2;
    }
    qsort(latencies, answered, sizeof *latencies, compare);
#define AT(share) ((double)latencies[(size_t)((double)(answered - 1) * (share))] / 1e6)
    printf("{\"sent\": %zu, \"errors\": %zu, \"seconds\": %.3f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"p999_ms\": %.3f, "
           "\"max_ms\": %.3f, \"sent_late\": %.5f, \"is_real_time\": %s}\n",
           sent, errors, took_s, AT(0.5), AT(0.99), AT(0.999), AT(1), (double)late / (double)sent,
           is_real_time ? "true" : "false");
    return 0;
}
