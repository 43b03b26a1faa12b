/*
 * A plain NBD server: what one thread that does nothing else reaches with blocking calls.
 *
 * plain_server SOCKET IMAGE direct|cached
 *
 * One export, whatever name is asked for; a thread for each client; requests one after the other, in the order in which
 * they come, each with one pread or pwrite (RWF_DSYNC where it is to be durable). Requests that come together are received
 * together. No server for anything else: it trusts its client, and ends with the process.
 *
 * NBD protocol, sections "Newstyle negotiation" and "Transmission phase".
 */
#define _GNU_SOURCE
#include <endian.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <linux/fs.h>
#include <unistd.h>

enum { INBOX = 16 << 10, MAX_DATA = 32 << 20, ALIGNMENT = 4096 };
enum { OPT_EXPORT_NAME = 1, OPT_ABORT = 2, OPT_INFO = 6, OPT_GO = 7 };
enum { CMD_READ = 0, CMD_WRITE = 1, CMD_DISC = 2, CMD_FLUSH = 3, CMD_FLAG_FUA = 1 };
/* NBD_FLAG_HAS_FLAGS, SEND_FLUSH, SEND_FUA, CAN_MULTI_CONN */
enum { FLAGS = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 8 };

static int image;
static uint64_t size;

struct request {
    uint32_t magic;
    uint16_t flags, type;
    uint64_t cookie, offset;
    uint32_t length;
} __attribute__((packed));

struct reply {
    uint32_t magic, error;
    uint64_t cookie;
} __attribute__((packed));

struct client {
    int socket;
    size_t at, filled;
    char *data;
    char inbox[INBOX];
};

/* Whether all of it was sent. */
static int send_all(int socket, struct iovec *parts, int count)
{
    while (count > 0) {
        ssize_t sent = writev(socket, parts, count);
        if (sent < 0)
            return 0;
        for (; count > 0 && (size_t)sent >= parts->iov_len; count--)
            sent -= (parts++)->iov_len;
        if (count > 0) {
            parts->iov_base = (char *)parts->iov_base + sent;
            parts->iov_len -= sent;
        }
    }
    return 1;
}

static int send_bytes(int socket, void *bytes, size_t length)
{
    struct iovec part = { bytes, length };
    return send_all(socket, &part, 1);
}

/* Whether so many bytes came: those that are here first. */
static int receive(struct client *client, void *into, size_t length)
{
    char *to = into;
    while (length > 0) {
        size_t here = client->filled - client->at;
        if (here > 0) {
            here = here < length ? here : length;
            memcpy(to, client->inbox + client->at, here);
            client->at += here;
        } else {
            /* What is longer than the inbox goes to its place at once. */
            char *place = length >= INBOX ? to : client->inbox;
            ssize_t came = recv(client->socket, place, length >= INBOX ? length : INBOX, 0);
            if (came <= 0)
                return 0;
            if (place == client->inbox) {
                client->at = 0;
                client->filled = came;
                continue;
            }
            here = came;
        }
        to += here;
        length -= here;
    }
    return 1;
}

static int send_option_reply(int socket, uint32_t option, uint32_t type, void *data, uint32_t length)
{
    struct { uint64_t magic; uint32_t option, type, length; } __attribute__((packed)) head = {
        htobe64(0x3e889045565a9), htobe32(option), htobe32(type), htobe32(length) };
    struct iovec parts[] = { { &head, sizeof head }, { data, length } };
    return send_all(socket, parts, 2);
}

/* Whether the client goes on to requests. */
static int negotiate(struct client *client)
{
    struct { uint64_t magic, options; uint16_t flags; } __attribute__((packed)) greeting = {
        htobe64(0x4e42444d41474943), htobe64(0x49484156454f5054), htobe16(3) };
    uint32_t client_flags;
    if (!send_bytes(client->socket, &greeting, sizeof greeting)
        || !receive(client, &client_flags, sizeof client_flags))
        return 0;
    for (;;) {
        struct { uint64_t magic; uint32_t option, length; } __attribute__((packed)) head;
        if (!receive(client, &head, sizeof head))
            return 0;
        uint32_t option = be32toh(head.option), length = be32toh(head.length);
        if (length > INBOX || !receive(client, client->data, length))
            return 0;
        struct { uint16_t type; uint64_t size; uint16_t flags; } __attribute__((packed)) export = {
            htobe16(0), htobe64(size), htobe16(FLAGS) };
        if (option == OPT_EXPORT_NAME) {
            char zeros[124] = { 0 };
            int no_zeros = be32toh(client_flags) & 2;
            struct iovec parts[] = { { &export.size, 10 }, { zeros, no_zeros ? 0 : sizeof zeros } };
            return send_all(client->socket, parts, 2);
        }
        if (option == OPT_ABORT)
            return 0;
        int is_known = option == OPT_GO || option == OPT_INFO;
        if (is_known && !send_option_reply(client->socket, option, 3, &export, sizeof export))
            return 0;
        /* NBD_REP_ACK, or NBD_REP_ERR_UNSUP */
        if (!send_option_reply(client->socket, option, is_known ? 1 : 1u << 31 | 1, NULL, 0))
            return 0;
        if (option == OPT_GO)
            return 1;
    }
}

/* The error for the client, or 0. */
static uint32_t carry_out(const struct request *request, char *data, uint32_t length)
{
    uint64_t offset = be64toh(request->offset);
    struct iovec part = { data, length };
    int durable = be16toh(request->flags) & CMD_FLAG_FUA ? RWF_DSYNC : 0;
    ssize_t done;
    switch (be16toh(request->type)) {
    case CMD_READ:
        done = pread(image, data, length, offset);
        break;
    case CMD_WRITE:
        done = pwritev2(image, &part, 1, offset, durable);
        break;
    case CMD_FLUSH:
        done = fdatasync(image);
        break;
    default:
        return EINVAL;
    }
    return done < 0 ? (uint32_t)errno : (size_t)done < length ? EIO : 0;
}

static void serve(struct client *client)
{
    struct request request;
    while (receive(client, &request, sizeof request)) {
        int type = be16toh(request.type);
        uint32_t length = type == CMD_READ || type == CMD_WRITE ? be32toh(request.length) : 0;
        if (type == CMD_DISC || length > MAX_DATA)
            return;
        if (type == CMD_WRITE && !receive(client, client->data, length))
            return;
        uint32_t error = carry_out(&request, client->data, length);
        struct reply reply = { htobe32(0x67446698), htobe32(error), request.cookie };
        struct iovec parts[] = { { &reply, sizeof reply }, { client->data, length } };
        int with_data = type == CMD_READ && error == 0;
        if (!send_all(client->socket, parts, with_data ? 2 : 1))
            return;
    }
}

static void *run(void *argument)
{
    struct client *client = argument;
    if (posix_memalign((void **)&client->data, ALIGNMENT, MAX_DATA) != 0)
        errx(1, "no memory");
    if (negotiate(client))
        serve(client);
    close(client->socket);
    free(client->data);
    free(client);
    return NULL;
}

int main(int count, char **words)
{
    if (count != 4)
        errx(2, "usage: plain_server SOCKET IMAGE direct|cached");
    /* A client that leaves ends its own thread only. */
    signal(SIGPIPE, SIG_IGN);
    int direct = strcmp(words[3], "direct") == 0 ? O_DIRECT : 0;
    image = open(words[2], O_RDWR | O_CLOEXEC | direct);
    struct stat status;
    if (image < 0 || fstat(image, &status) < 0)
        err(1, "%s", words[2]);
    size = status.st_size;
    if (S_ISBLK(status.st_mode) && ioctl(image, BLKGETSIZE64, &size) < 0)
        err(1, "%s", words[2]);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (strlen(words[1]) >= sizeof address.sun_path)
        errx(1, "%s: too long", words[1]);
    strcpy(address.sun_path, words[1]);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0
        || listen(listener, 16) < 0)
        err(1, "%s", words[1]);
    for (;;) {
        struct client *client = calloc(1, sizeof *client);
        pthread_t thread;
        if (client == NULL || (client->socket = accept(listener, NULL, NULL)) < 0)
            err(1, "accept");
        if (pthread_create(&thread, NULL, run, client) != 0)
            errx(1, "no thread");
        pthread_detach(thread);
    }
}
