/* What sockets alone cost: an HTTP server that looks at a request only to find its end, and answers with a file.
 *
 * usage: socket PORT FILE
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECTIONS 8192
#define BUFFER 65536
#define ANSWER_MAX (1 << 20)

struct conn { size_t used; char bytes[BUFFER + 1]; };
static struct conn *conns[CONNECTIONS]; /* by descriptor */
static char answer[ANSWER_MAX];
static size_t answer_len;

static _Noreturn void die(const char *why) {
  fprintf(stderr, "socket: %s\n", why);
  exit(2);
}
/* How long the first request is; 0: it is not all there. */
static size_t whole(struct conn *c) {
  char *end = memmem(c->bytes, c->used, "\r\n\r\n", 4);
  if (!end) return 0;
  char *length = strcasestr(c->bytes, "\r\ncontent-length:");
  size_t n = end + 4 - c->bytes + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
  if (n > BUFFER) die("a request is too long");
  return n <= c->used ? n : 0;
}
static void arrived(int fd) {
  struct conn *c = conns[fd];
  ssize_t n = read(fd, c->bytes + c->used, BUFFER - c->used);
  if (n <= 0) { close(fd); return; }
  c->used += n;
  c->bytes[c->used] = 0;
  for (size_t size; (size = whole(c));) {
    memmove(c->bytes, c->bytes + size, c->used - size + 1);
    c->used -= size;
    if (write(fd, answer, answer_len) != (ssize_t)answer_len) die("a client does not read");
  }
}
static void welcome(int ep, int listener) {
  int one = 1, fd = accept(listener, NULL, NULL);
  if (fd < 0 || fd >= CONNECTIONS) die("too many connections");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (!conns[fd]) conns[fd] = malloc(sizeof *conns[fd]);
  conns[fd]->used = 0;
  struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
  epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}
int main(int argc, char **argv) {
  if (argc != 3) die("usage: socket PORT FILE");
  FILE *file = fopen(argv[2], "rb");
  if (!file || !(answer_len = fread(answer, 1, sizeof answer, file))) die("FILE has no answer");
  int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), ep = epoll_create1(0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&a, sizeof a) || listen(listener, CONNECTIONS)) die("the port is taken");
  struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
  epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
  for (struct epoll_event events[512];;) {
    int ready = epoll_wait(ep, events, 512, -1);
    for (int i = 0; i < ready; i++) {
      if (events[i].data.fd == listener) welcome(ep, listener);
      else arrived(events[i].data.fd);
    }
  }
}
