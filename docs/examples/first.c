/* SPDX-License-Identifier: MIT */
#include <gpuloan/gpuloan.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
#define TRY(call) do { if ((call) != GPULOAN_OK) return fprintf(stderr, "%s\n", gpuloan_error_text()), 1; } while (0)

int main(int argc, char **argv) {
  gpuloan_context_options options = GPULOAN_INIT(gpuloan_context_options);
  gpuloan_region_options place = GPULOAN_INIT(gpuloan_region_options);
  gpuloan_lend_options terms = GPULOAN_INIT(gpuloan_lend_options);
  gpuloan_event event = GPULOAN_INIT(gpuloan_event);
  gpuloan_view view = GPULOAN_INIT(gpuloan_view);
  gpuloan_context *context; gpuloan_peer *parent; gpuloan_region *region; gpuloan_loan *loan;
  int ends[2], worker = argc > 1;
  options.role = worker ? GPULOAN_ROLE_IMPORTER : GPULOAN_ROLE_EXPORTER;
  options.flags = worker ? GPULOAN_CONTEXT_NO_DEVICE : 0; /* this worker has no GPU */
  TRY(gpuloan_context_create(&options, &context));
  if (worker) { /* takes what it is lent, writes into it in place, gives it back */
    TRY(gpuloan_context_adopt(context, 0, 5000, &parent));
    while (event.type != GPULOAN_EVENT_LOAN_OFFERED) TRY(gpuloan_context_next_event(context, 5000, &event));
    TRY(gpuloan_loan_acquire(loan = event.loan, 5000, &view));
    snprintf(view.host, view.bytes, "written in place by process %d", (int)getpid());
    TRY(gpuloan_loan_done(loan, GPULOAN_STREAM_CPU));
  } else { /* the parent: starts the worker, lends it 64 bytes for write */
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return 1;
    if (fork() == 0) return dup2(ends[1], 0), execl("/proc/self/exe", argv[0], "worker", (char *)NULL);
    close(ends[1]);
    TRY(gpuloan_context_attach(context, ends[0], "worker"));
    while (event.type != GPULOAN_EVENT_PEER_READY) TRY(gpuloan_context_next_event(context, 5000, &event));
    place.bytes = 64, place.access = terms.access = GPULOAN_ACCESS_WRITE;
    place.memory = terms.memory = GPULOAN_MEMORY_HOST;
    TRY(gpuloan_region_create(event.peer, &place, &region));
    TRY(gpuloan_lend(event.peer, gpuloan_region_pointer(region), 64, &terms, &loan));
  }
  TRY(gpuloan_loan_wait_end(loan, 5000)); /* RELEASE: the worker is through, the memory is the parent's again */
  if (!worker) printf("process %d reads: %s\n", (int)getpid(), (char *)gpuloan_region_host(region));
  gpuloan_context_destroy(context);
  return 0;
}
