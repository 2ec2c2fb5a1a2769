/* A network with a delay: `delay DEVICE MICROSECONDS NAMESPACE...` makes a TUN device in every network namespace and
 * carries each packet to the host that its address names, so much later. Host i has the address that ends in i + 1.
 *
 * The delay is the same for all packets, so they leave in the order in which they came: one queue is enough. Where
 * the queue is full, or a host does not take a packet, the packet is lost, as on any network.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HOSTS = 100, PACKET_BYTES = 2048, QUEUE_PACKETS = 1 << 15, AT_ONCE = 32 };

struct packet {
    int64_t due_ns;
    int host;
    int size;
    uint8_t bytes[PACKET_BYTES];
};

static struct packet *queue;
static unsigned head, tail; /* packets head … tail-1 wait; both only ever grow */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void fail(const char *what, const char *which) {
    fprintf(stderr, "%s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

/* A TUN device in another namespace. We stay there: the next call leads elsewhere, and we use no network ourselves. */
static int open_device(const char *namespace, const char *name) {
    int place = open(namespace, O_RDONLY | O_CLOEXEC);
    if (place < 0 || setns(place, CLONE_NEWNET) != 0) fail("cannot enter", namespace);
    close(place);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("cannot open", "/dev/net/tun");
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    if (ioctl(device, TUNSETIFF, &request) != 0) fail("cannot make", name);
    return device;
}

/* The host that an IPv4 packet is for, or -1. */
static int host_of(const struct packet *packet, int num_hosts) {
    if (packet->size < 20 || packet->bytes[0] >> 4 != 4) return -1;
    int host = packet->bytes[19] - 1;
    return host < num_hosts ? host : -1;
}

static void take_packets(int device, int64_t delay_ns, int num_hosts) {
    for (int count = 0; count < AT_ONCE; count++) {
        struct packet *packet = &queue[tail % QUEUE_PACKETS], lost;
        int is_full = tail - head == QUEUE_PACKETS;
        if (is_full) packet = &lost;
        packet->size = read(device, packet->bytes, PACKET_BYTES);
        if (packet->size <= 0) return;
        packet->host = host_of(packet, num_hosts);
        packet->due_ns = now_ns() + delay_ns;
        if (!is_full && packet->host >= 0) tail++;
    }
}

static void give_packets(const int *devices) {
    for (int64_t now = now_ns(); head != tail && queue[head % QUEUE_PACKETS].due_ns <= now; head++) {
        struct packet *packet = &queue[head % QUEUE_PACKETS];
        if (write(devices[packet->host], packet->bytes, packet->size) < 0 && errno == EBADF) exit(1);
    }
}

int main(int argc, char **argv) {
    int num_hosts = argc - 3;
    if (num_hosts < 1 || num_hosts > MOST_HOSTS) {
        fprintf(stderr, "usage: %s DEVICE MICROSECONDS NAMESPACE...\n", argv[0]);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* whoever made the network is gone: so is the network */
    int64_t delay_ns = atoll(argv[2]) * 1000;
    int devices[MOST_HOSTS];
    struct pollfd polled[MOST_HOSTS];
    for (int host = 0; host < num_hosts; host++) {
        devices[host] = open_device(argv[3 + host], argv[1]);
        polled[host] = (struct pollfd){.fd = devices[host], .events = POLLIN};
    }
    queue = malloc(sizeof *queue * (size_t)QUEUE_PACKETS); /* 64 MiB, touched only as far as it is used */
    if (queue == NULL) fail("cannot allocate", "the queue");
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t left = head == tail ? -1 : queue[head % QUEUE_PACKETS].due_ns - now_ns();
        if (head != tail && left < 0) left = 0;
        struct timespec patience = {left / 1000000000, left % 1000000000};
        if (ppoll(polled, num_hosts, head == tail ? NULL : &patience, NULL) < 0 && errno != EINTR) return 1;
        for (int host = 0; host < num_hosts; host++)
            if (polled[host].revents & POLLIN) take_packets(devices[host], delay_ns, num_hosts);
        give_packets(devices);
    }
}
