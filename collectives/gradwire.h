/* Gradwire's C ABI: gradients averaged over many processes with few bytes on the wire.
 *
 * Three calls: gw_comm_create() once per process, gw_reducer_create() once per model, and
 * gw_reducer_allreduce() in every step. docs/extending.md is the tutorial.
 *
 * Status   Every function returns a gw_status, except the three that report versions and errors. No exception
 *          leaves the library, and it never ends the process. After anything but GW_OK, gw_last_error() says
 *          what was wrong and what to do. Outputs are written only on GW_OK.
 * Handles  gw_comm, gw_reducer and gw_request are names, not addresses: a null, made-up or destroyed handle gives
 *          GW_BAD_HANDLE, never a crash. A handle belongs to the process that created it (not to its forks).
 * Threads  Any function may be called from any thread. Calls on one communicator and its reducers are
 *          serialized; only gw_comm_abort() does not wait its turn.
 * Order    All ranks of a communicator must make the collective calls (marked as such) in the same order and
 *          with the same arguments, except those marked "may differ". Ranks that disagree get GW_COMM_FAILED
 *          with a text that names both calls. Two calls whose arguments differ in nothing but the address can
 *          only be told apart by a tag: see gw_call_tag().
 * Failure  A missed deadline, a dead peer, a disagreement or gw_comm_abort() is final for the communicator:
 *          every pending and later call fails on every rank that can be reached. Then destroy it and
 *          create another, or go on with the ranks that are left: gw_comm_shrink(). New ranks can
 *          join: gw_comm_grow().
 * Streams  On a CUDA device, `stream` is a cudaStream_t cast to void* (null: the legacy default stream):
 *          calls enqueue work and return, and later work on that stream sees the results. While the stream is
 *          captured in a CUDA graph they return GW_UNSUPPORTED. No call changes the thread's current device.
 *          On the host `stream` must be null, and a call returns when its result is ready, or at once if it
 *          has a gw_request.
 * Memory   Gradient memory belongs to the caller and is on the communicator's device. It must stay valid
 *          until the stream has passed the call that used it, or until its gw_request is done.
 * Structs  Zero the struct, set `size` to its sizeof, then fill it in; zero means the default. This lets
 *          structs grow without breaking programs compiled against older headers.
 */
#ifndef GRADWIRE_H
#define GRADWIRE_H

#include <stddef.h>
#include <stdint.h>

#define GW_VERSION_MAJOR 0
#define GW_VERSION_MINOR 1
#define GW_VERSION_PATCH 0

#if defined(__GNUC__)
#define GW_API __attribute__((visibility("default")))
#else
#define GW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Integers of fixed size rather than enum types, so that an invalid value can be detected and rejected. */
typedef int32_t gw_status;
enum {
  GW_OK = 0,
  GW_BAD_ARGUMENT = 1,  /* null, out of range, or a string that does not parse */
  GW_BAD_HANDLE = 2,    /* null, not a handle, of the wrong kind, destroyed, or from another process */
  GW_COMM_FAILED = 3,   /* deadline, dead peer, disagreement, abort, a failed callback of gw_format or
                           gw_store: final for the communicator */
  GW_DEVICE_FAILED = 4, /* a CUDA call failed, or the device does not exist */
  GW_UNSUPPORTED = 5,   /* valid, but not supported by this version or build */
  GW_NO_MEMORY = 6,     /* host or device memory, threads or file descriptors: the text names
                           the resource, the limit and the remedy */
  GW_INTERNAL = 7,      /* a bug in the library */
  GW_NOT_DONE = 8       /* of gw_request_wait() only: its time is over; the call goes on */
};

typedef int32_t gw_dtype;
enum { GW_FLOAT32 = 0, GW_BFLOAT16 = 1, GW_FLOAT16 = 2 };

typedef int32_t gw_op;
enum { GW_SUM = 0, GW_AVG = 1 };

#define GW_HOST (-1) /* as a device: host memory and threads */

typedef struct gw_comm_handle* gw_comm;
typedef struct gw_reducer_handle* gw_reducer;
typedef struct gw_request_handle* gw_request;

/* ---- Version and errors: these cannot fail and return no status ---------------------------------------- */

/* Version of the loaded library: major * 10000 + minor * 100 + patch. Compare with GW_VERSION_*. */
GW_API int gw_version(void);

/* A constant such as "GW_BAD_HANDLE"; never null, whatever the number. */
GW_API const char* gw_status_string(gw_status status);

/* The error text of this thread's last failed call; "" if none has failed. Valid until this thread's next
 * failing call. Never null. */
GW_API const char* gw_last_error(void);

/* ---- Communicators ------------------------------------------------------------------------------------- */

/* Joins a group of `world` ranks. Collective: blocks until all have joined.
 *
 * rendezvous  how the ranks find each other, the same on all of them:
 *               "tcp://HOST:PORT"  processes on any machines; rank 0 listens on PORT of HOST. Where HOST can be
 *                                  reached from other machines, the run needs a secret: see gw_secret()
 *               "file:///PATH"     processes that share a directory; rank 0 creates and removes PATH in it
 *               "nccl://"          processes with one GPU each that meet at HOST:PORT from the environment
 *                                  variable NCCL_COMM_ID, as in other NCCL programs
 *               "local://NAME"     threads of one process, one per rank
 *             Processes on GPUs communicate through NCCL, which is loaded on demand; processes on the host
 *             through TCP. May be null when world is 1. Once the group has formed, the name is free again.
 * rank        0 .. world - 1, each exactly once; world is at most 65536.
 * device      GW_HOST on all ranks, or the number of a CUDA device of this process, which may differ.
 * timeout_ms  > 0. The longest wait for a peer, both while joining and later in any operation. If one rank
 *             writes a checkpoint during a step, that counts as a wait for all the others. May differ: each
 *             rank applies its own. Time during which this process is stopped does not count.
 * comm        out; release it with gw_comm_destroy().
 *
 * GW_BAD_ARGUMENT, GW_COMM_FAILED (a rank did not join; the text says which), GW_DEVICE_FAILED,
 * GW_UNSUPPORTED. */
GW_API gw_status gw_comm_create(const char* rendezvous, int rank, int world, int device, int64_t timeout_ms,
                                gw_comm* comm);

/* A key-value store that all ranks reach: torch.distributed's, etcd, a table that MPI broadcasts. */
typedef struct gw_store {
  size_t size; /* sizeof(gw_store) */
  /* Both return null, or a text that says what went wrong; it is copied at once. `key` is printable ASCII without spaces;
   * timeout_ms, > 0, is how long they may take. */
  /* Makes `value` (bytes), not empty, what every rank's get() finds under `key`. */
  const char* (*set)(void* user, const char* key, const void* value, size_t bytes, int64_t timeout_ms);
  /* Waits until `key` is set. Writes its value, as much as fits, to `value` (capacity), and its size to *bytes, which
   * is 0 before the call and stays so if nobody sets the key in time. */
  const char* (*get)(void* user, const char* key, int64_t timeout_ms, void* value, size_t capacity,
                     size_t* bytes);
  void* user; /* passed to both */
  const char*
      prefix; /* of the key; null: none. A new one for each communicator made through the same store, or a rank
                         may find the last one's entry */
} gw_store;

/* Joins a group of `world` processes that find each other through a store that they have. Collective. Rank 0 sets one
 * key, PREFIX "gradwire/meeting", to its addresses and a fresh random secret; the others get it. So any
 * process that can read the store may join. With a gw_secret() or GRADWIRE_SECRET, a process must also know
 * that secret. Every rank listens at all of its addresses, or at the address of gw_listen()'s interface. The
 * store is not used afterwards, and keys are not deleted.
 *
 * store  its callbacks are called by this thread, during this call only: rank 0's set() once; the others' get() until
 *        they have reached rank 0, 50 times a second at most. They must not throw, and the call waits for them: one that
 *        is not back in time is an error once it is back. Not called when world is 1.
 * Others: as of gw_comm_create(). gw_shrinkable() applies as well.
 *
 * GW_BAD_ARGUMENT, GW_COMM_FAILED (also with the text of a callback that failed, or if the key holds something that rank 0
 * has not written), GW_DEVICE_FAILED, GW_UNSUPPORTED. */
GW_API gw_status gw_comm_from_store(const gw_store* store, int rank, int world, int device,
                                    int64_t timeout_ms, gw_comm* comm);

/* Whoever knows this text may join: it is the secret of this thread's next gw_comm_create() with tcp:// or
 * file://, or gw_comm_from_store(), the same on every rank, and takes the place of the environment's
 * GRADWIRE_SECRET. Ranks prove to each other that they know it before anything else is read from a connection;
 * docs/running.md says what that protects.
 *
 * secret  not empty; copied. Null: none.
 *
 * GW_BAD_ARGUMENT. */
GW_API gw_status gw_secret(const char* secret);

/* Where this process listens for the other ranks' data, in this thread's next gw_comm_create() on the host with
 * tcp:// or file://, gw_comm_from_store() or gw_comm_join(), and in what is split from that communicator,
 * shrinks, or grows. Each rank decides for itself. The port in tcp://HOST:PORT is independent of these ports.
 *
 * interface              the name of a network interface, such as "eth1"; null: GRADWIRE_INTERFACE, else with
 *                        tcp:// the interface that reaches rank 0, otherwise all
 * first_port, last_port  the first free port of this range is used, for example of the range that a firewall
 *                        admits; 0 and 0: GRADWIRE_PORTS, else any port. Joining uses one port until all
 *                        ranks are connected. gw_shrinkable(1) uses one more and keeps it. Rank 0's store
 *                        uses another, except with a tcp:// rendezvous.
 *
 * GW_BAD_ARGUMENT: no such interface (the text lists those that exist), or not a range. gw_comm_create() gives
 * GW_COMM_FAILED if none of the ports is free. */
GW_API gw_status gw_listen(const char* interface, int first_port, int last_port);

/* Uses an existing NCCL communicator, which remains the caller's and must outlive *comm. Collective.
 *
 * nccl_comm   an ncclComm_t cast to void*.
 * device      the CUDA device it was created on.
 *
 * Gradwire never aborts this communicator: after timeout_ms calls fail, but work already enqueued on the GPU
 * keeps waiting until the owner aborts it. No other thread may use it during a call. Between calls, others
 * may use it on another stream only in an order that is the same on every rank.
 *
 * GW_BAD_ARGUMENT, GW_DEVICE_FAILED, GW_UNSUPPORTED if NCCL is missing. */
GW_API gw_status gw_comm_from_nccl(void* nccl_comm, int device, int64_t timeout_ms, gw_comm* comm);

/* Makes communicators of some of the ranks: those that pass the same `color` form one, ordered by `key`, then by their
 * rank in `comm`. Collective over `comm`; colors and keys may differ.
 *
 * color   0 or more; negative: this rank joins none, and *part is null.
 * part    out; independent of `comm`, which may be destroyed first: neither hears of the other's failures. Its ranks
 *         meet through `comm`, so it needs neither a rendezvous nor a secret of its own. The number of ranks per node
 *         is unknown. Between GPUs NCCL splits the group, and errors of the part name fewer ranks; calls that differ
 *         between its ranks are not compared.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED. */
GW_API gw_status gw_comm_split(gw_comm comm, int color, int key, gw_comm* part);

/* With `on` not 0, the processes of this thread's next gw_comm_create() with tcp:// or file://, or gw_comm_from_store(),
 * can go on after a failure: see gw_comm_shrink(). The same on every rank. Each listens at one more port, behind the
 * same secret. With GPUs it needs NCCL 2.28.7. Other kinds of communicators cannot shrink; creating one then gives
 * GW_UNSUPPORTED, unless world is 1. */
GW_API gw_status gw_shrinkable(int on);

/* Makes a communicator of the ranks that are left of one that has failed: those that call this. They find out by
 * themselves who they are, also when rank 0 is not among them. Collective over the survivors; fails a communicator that
 * has not failed yet, so that all ranks come here.
 *
 * comm        made with gw_shrinkable(1). Afterwards it and its reducers can only be destroyed.
 * timeout_ms  > 0. How long to wait for ranks that are alive but do not call this. A rank whose process has ended is
 *             not waited for. Ranks that are stopped or cut off get 1 s to answer, all at the same time.
 *             This second does not count: the timeout begins when the lowest rank that answers has found that
 *             no lower rank does. May differ. Once the survivors know each other, they have up to 5 s more to
 *             connect.
 * rest        out: can shrink in turn. Like a part of gw_comm_split(), it needs no rendezvous, and the number of ranks
 *             per node is unknown.
 * ranks       out: the survivors' ranks in `comm`, ascending: ranks[i] is rank i of `rest`. May be null. After a
 *             gw_comm_grow() that failed here and not everywhere, new ranks may follow, whose rank in `comm` is -1.
 * capacity    of `ranks`: at least the world of `comm`, unless it is null.
 *
 * At most one group goes on. A rank that did not answer the others, and calls this later, gets GW_COMM_FAILED, and so
 * do ranks that may be the smaller part: of the ranks whose processes have not ended, fewer than half, or half without
 * the lowest. Results of the failed call, and the state of a reducer whose call failed, are undefined: to repeat a step,
 * keep the gradients and a gw_reducer_state_save() of the step before. gw_reducer_state_load() loads that
 * state into a reducer of `rest`. The residuals of a lost rank are lost with it.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED: may be called again where somebody did not come in time. */
GW_API gw_status gw_comm_shrink(gw_comm comm, int64_t timeout_ms, gw_comm* rest, int32_t* ranks,
                                int32_t capacity);

/* New ranks. Processes that were not there from the beginning can join a communicator that was made with
 * gw_shrinkable(1), between two of its calls:
 *
 *   the ranks                                            a new process
 *   gw_comm_admit(comm, 4)
 *   gw_comm_doors(comm, doors, ...), for it              gw_comm_join(doors, ...) waits
 *   ... calls; between two of them, when gw_comm_waiting() was not 0 on rank 0, of which rank 0 has told the others:
 *   gw_comm_grow(comm, &grown)                           and returns, as a rank of `grown`
 *   gw_comm_destroy(comm)
 *
 * The caller sends the state that a new rank needs from the others, for example weights: gw_broadcast() over
 * `grown`. Reducers of `comm` can only be destroyed. The ranks save their state before gw_comm_grow() and
 * load it into reducers of `grown` with gw_reducer_state_load(). The new rank gets a copy of one of these
 * states and loads it with gw_reducer_state_load_ranks(), n = 1. Step count and factors are the same on every
 * rank; the new rank's residuals start at 0. */

/* From here on processes may ask to join, as long as there are no more than `most` ranks with them; 0: nobody any more, and
 * those who wait are told. To be called on every rank, since any may be rank 0 later; holds for the communicators that
 * gw_comm_shrink() and gw_comm_grow() make of this one. A new rank calls it for itself. May differ: rank 0's counts, and
 * who asks before rank 0 has called it is refused.
 *
 * GW_BAD_ARGUMENT, also for a communicator that was not made with gw_shrinkable(1); GW_BAD_HANDLE. */
GW_API gw_status gw_comm_admit(gw_comm comm, int32_t most);

/* What a process needs to find the ranks, the same on each: their addresses, and the random secret of a communicator
 * that met through file://. So for those only who may join. It changes with gw_comm_shrink() and gw_comm_grow(), but an
 * older one does as long as one of its ranks is there.
 *
 * text      out, if `capacity` is enough: with a final zero.
 * bytes     out: the size of the text in bytes; about 100 per rank, more if a host has several addresses.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE. */
GW_API gw_status gw_comm_doors(gw_comm comm, char* text, size_t capacity, size_t* bytes);

/* How many processes wait to join; always 0 but on rank 0. Asks nobody, and may be called as often as one likes.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE. */
GW_API gw_status gw_comm_waiting(gw_comm comm, int32_t* processes);

/* Makes a communicator of the ranks of `comm` and of the processes that wait to join, which follow them. Collective. If
 * a process that waited dies now, the ranks notice at once; if it stops answering, after up to 10 s.
 *
 * grown   out: can grow and shrink in turn. Null if nobody has joined in the end: then `comm` goes on. Else `comm` and its
 *         reducers can only be destroyed. The number of ranks per node is unknown.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED. */
GW_API gw_status gw_comm_grow(gw_comm comm, gw_comm* grown);

/* Joins a communicator whose ranks call gw_comm_grow(). Its secret is gw_secret()'s, or the environment's.
 *
 * doors       from gw_comm_doors().
 * timeout_ms  > 0. As in gw_comm_create(); and how long to wait for being let in.
 * comm        out: like `grown` above.
 *
 * GW_BAD_ARGUMENT, with the reason, if it is refused: too many ranks, or another version of the library.
 * GW_COMM_FAILED if no rank answers, or none lets this process in. */
GW_API gw_status gw_comm_join(const char* doors, int64_t timeout_ms, gw_comm* comm);

typedef struct gw_comm_info {
  size_t size; /* sizeof(gw_comm_info), set by the caller */
  int32_t rank, world;
  int32_t device;         /* GW_HOST, or the number of a CUDA device */
  int32_t ranks_per_node; /* 0: unknown */
  uint64_t bytes_sent;    /* of payload, by this rank so far */
  const char* transport;  /* "local", "tcp" or "nccl"; static */
} gw_comm_info;

/* Describes the communicator. GW_BAD_ARGUMENT, GW_BAD_HANDLE. */
GW_API gw_status gw_comm_query(gw_comm comm, gw_comm_info* info);

/* Sets how ranks are placed on nodes: rank = node * ranks_per_node + local index, as launchers number them.
 * Required by schedule=hierarchical, taken into account by schedule=auto. Call it before the first reducer
 * and collective call, with the same value on every rank. 0: unknown, the default.
 *
 * GW_BAD_ARGUMENT unless it divides the world size. */
GW_API gw_status gw_comm_set_ranks_per_node(gw_comm comm, int ranks_per_node);

/* GW_COMM_FAILED, with the reason, once the communicator has failed; otherwise GW_OK. A CUDA stream carries
 * no errors: when an operation on it is abandoned, the stream continues with garbage in the buffers. So
 * synchronize, then check, and only then use the results. On the host the failing calls report it
 * themselves. */
GW_API gw_status gw_comm_check(gw_comm comm);

/* Fails everything pending on the communicator, on this rank and on all others that can be reached, with
 * `reason` (may be null) in their error texts. For watchdogs: returns at once; any thread may call it. */
GW_API gw_status gw_comm_abort(gw_comm comm, const char* reason);

/* Lets another thread cancel calls of this thread that wait for ranks and have no communicator to abort:
 * gw_comm_create(), gw_comm_from_store(), gw_comm_join(), gw_comm_shrink(). Once *flag is not 0, the
 * deadlines of these calls are over. The calls notice within 0.1 s and return GW_COMM_FAILED within seconds.
 * A call that begins after that fails at once.
 * A program can handle Ctrl-C this way: it makes the call on a separate thread and sets the flag from the
 * thread that handles signals.
 *
 * flag  owned by the caller; must stay valid until this thread passes another flag, or null. Null: not
 *       cancellable, the default. */
GW_API gw_status gw_cancellable(const volatile int32_t* flag);

/* Releases the handle; the group itself lives until its last reducer is destroyed as well. Waits for work in
 * flight; to avoid the wait, abort first. Null does nothing. */
GW_API gw_status gw_comm_destroy(gw_comm comm);

/* ---- Tags ---------------------------------------------------------------------------------------------- */

/* Labels this thread's next collective call or gw_reducer_create() on `comm`, for example with a tensor's
 * name. Ranks compare the tag along with the call's other arguments, and error texts quote it. If two ranks
 * make two calls of equal size in different orders, tags turn that into an error on every rank. Without tags
 * the calls cannot be told apart, and each rank gets sums of unrelated tensors. So where a scheduler, a
 * compiler or several threads decide the order of calls, tag all of them.
 *
 * tag     at most 1000 bytes of UTF-8 without control characters; copied. Null or "": none. A reducer's tag
 *         applies to all its calls. The next call consumes the tag, whether it succeeds or not.
 *
 * Between GPUs (NCCL), ranks compare a call only the first time it is made; calls that all ranks have made
 * before can be reordered unnoticed.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE. */
GW_API gw_status gw_call_tag(gw_comm comm, const char* tag);

/* ---- Requests: calls on the host that return at once ---------------------------------------------------- */

/* This thread's next collective call on `comm` returns when it has begun, and the request stands for it:
 *
 *     gw_request request;
 *     gw_request_begin(comm, &request);
 *     gw_allreduce(comm, gradients, n, GW_FLOAT32, GW_AVG, "int8", NULL);   // fails at once if it is refused
 *     ...                                                                    // gradients are in use
 *     gw_request_wait(request, 1000);
 *     gw_request_destroy(request);
 *
 * For gw_allreduce(), gw_allreduce_residual(), gw_reduce_scatter(), gw_all_gather(), gw_all_gather_update(),
 * gw_broadcast(), gw_reducer_allreduce() and gw_reducer_wait(). Calls run one after another in the order in which they
 * were made, with or without requests, and each has the communicator's deadline. The first call with a buffer builds its
 * program, for which it waits until calls in flight are done; so does a change of a residual's address.
 *
 * request  out; release it with gw_request_destroy().
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_UNSUPPORTED on a CUDA device, where streams do this. */
GW_API gw_status gw_request_begin(gw_comm comm, gw_request* request);

/* done: out, 1 when the result is ready, 0 while the call is in flight. Any thread may ask.
 * GW_BAD_ARGUMENT if no call was made for the request or it was refused, GW_COMM_FAILED if the call has failed. */
GW_API gw_status gw_request_test(gw_request request, int32_t* done);

/* Blocks until the result is ready, but no longer than timeout_ms (0 or more): then GW_NOT_DONE, and one may wait
 * again. Any thread may wait, several too. Otherwise as gw_request_test(). */
GW_API gw_status gw_request_wait(gw_request request, int64_t timeout_ms);

/* Waits for the call, if there was one, and frees the request; to avoid the wait, gw_comm_abort() first. Null does
 * nothing. */
GW_API gw_status gw_request_destroy(gw_request request);

/* ---- Wire formats of your own -------------------------------------------------------------------------- */

/* A wire format: a block of values becomes bytes. */
typedef struct gw_format {
  size_t size;      /* sizeof(gw_format) */
  const char* name; /* in specs: 1 to 64 letters, digits and '_'; copied */
  int64_t block;    /* values, 1 to 65536 */
  int64_t bytes;    /* of an encoded block, 1 to 1048576 */
  /* values (blocks, block) -> bytes (blocks, bytes), and back, without gaps. */
  const char* (*encode)(void* user, const float* values, int64_t blocks, uint8_t* bytes);
  const char* (*decode)(void* user, const uint8_t* bytes, int64_t blocks, float* values);
  void* user; /* passed to both */
} gw_format;

/* Makes a format known to this process by its name, which can then stand in every spec: "mine",
 * "mine:schedule=ring,ef=off", "powersgd:rank=4,wire=mine". Register it on every rank, alike: ranks whose
 * block or bytes differ are refused with GW_COMM_FAILED in the first call that uses it. Formats stay
 * registered.
 *
 * encode, decode   return null, or a text that says what went wrong; it is copied at once. Then that call and
 *                  all later ones of the communicator fail with GW_COMM_FAILED and this text, on every rank.
 *                  The same happens when a callback writes outside of its blocks. They must not throw, and
 *                  not call gw_* functions on the communicator that they work for, which refuse it.
 *
 * What is lost by encode is kept for the next step (error feedback), as for any format. One call covers many
 * blocks, up to 2^20 values; the last block of a chunk is padded with zeros, and bytes that encode does not
 * write are 0. Callbacks may be called by several threads at once, and are given values of any kind: where a
 * value is NaN or infinite, decode should give NaN, so that the error shows. That may cost its block: what was
 * given of its other values in that step may be lost. decode must depend on the bytes alone, so that all ranks
 * end with the same bits.
 *
 * The callbacks are tried on a few random blocks here. `user` must stay valid to the end of the process.
 * Registering a name again with the same block and bytes replaces the callbacks; on other threads the old
 * ones may still be at work. Host only: on a CUDA communicator, calls with the format's name are refused.
 *
 * GW_BAD_ARGUMENT: a bad name, one of Gradwire's own formats, or other block or bytes than before; a callback
 * failed, wrote outside of its blocks, or left a part of them unwritten. */
GW_API gw_status gw_format_register(const gw_format* format);

/* ---- Collectives on memory of your own ------------------------------------------------------------------ */

/* Sums or averages buf over all ranks, in place; every rank ends with the same bits. Collective.
 *
 * buf     (count) elements of dtype on the communicator's device, aligned to the element size. May be null
 *         when count is 0. The address may differ.
 * dtype   GW_FLOAT32, or GW_BFLOAT16 or GW_FLOAT16, which are converted to float32 for the reduction and back. A
 *         sum beyond float16 is infinity there.
 * op      GW_SUM beyond float32 (3.4e38) is infinity. GW_AVG is finite wherever float32 can hold the average, also
 *         where it could not hold the sum; docs/numerics.md has the exceptions: values near 3.4e38, and
 *         schedule=nccl, where NCCL divides.
 * spec    a wire format of docs/formats.md, such as "fp32" or "bf16:round=stochastic", or your own, with
 *         ",schedule=auto|ring|tree|two_shot|hierarchical|nccl", ",transport=messages|lsa|auto" and
 *         ",intra_node=wire|fp32". No state is kept between calls, so there is no error feedback: rounding errors
 *         are lost. "powersgd" and "randk" need a reducer. As in every function, a format whose encode may
 *         lose more than its input, such as "qsgd:bits=4", is refused without ",ef=off".
 * stream  see the top; may differ.
 *
 * The program for a buffer and tag is built at first use and cached (the 256 most recently used): reuse both.
 * Using buffers in varying order or number costs nothing; a new buffer blocks the caller until work in flight
 * is done. In a world of 1, buf is left unchanged.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED, GW_NO_MEMORY. */
GW_API gw_status gw_allreduce(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, gw_op op,
                              const char* spec, void* stream);

/* gw_allreduce() with error feedback, whose memory is yours.
 *
 * residual  (count) FP32, zeros at first: what this rank's rounding has lost so far. It is added before the
 *           next encode and replaced by what that one loses, so the same values must meet the same residual in
 *           every call. The sum over ranks of what they gave, residuals included, is the sum of what they got
 *           and keep, to FP32 rounding. Where the result is not finite, the residual becomes 0 on every rank.
 *           The other elements lose nothing, but an element that shares a block with a non-finite one may be
 *           sent in the next call instead. Null: as gw_allreduce(). Unused with "fp32". May differ. */
GW_API gw_status gw_allreduce_residual(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, gw_op op,
                                       const char* spec, float* residual, void* stream);

/* The halves of an allreduce, for models whose gradients and weights are divided among ranks, and broadcast.
 * All are collective. For all:
 *
 * counts    (world) elements of each rank's shard: any size, 0 too, the same on every rank. Shards lie one
 *           after another in rank order; `sum` below is the number of elements of all.
 * dtype     GW_FLOAT32, or GW_BFLOAT16 or GW_FLOAT16, which are converted to float32 and back. The wire carries
 *           what `spec` says: "bf16" for bfloat16 elements loses nothing; "fp32" sends twice the bytes.
 * spec      as in gw_allreduce(); schedule=tree is refused unless it fits. ef= has no effect: there is error
 *           feedback if `residual` is not null. "powersgd" and "randk" are refused: use a reducer.
 * residual  FP32, zeros at first, yours between calls: see gw_allreduce_residual(). Null: what rounding loses is
 *           lost. May differ.
 * Memory    Addresses may differ, and change from call to call; programs are kept by everything else (the 256
 *           most recently used, together with gw_allreduce's). On a CUDA device a change of address blocks the
 *           caller until work in flight is done.
 *
 * In a world of 1 they copy, whatever the spec.
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED, GW_NO_MEMORY. */

/* Sums or averages over all ranks; each rank gets its shard of the result. Overflow is as in gw_allreduce().
 *
 * in        (sum), this rank's part of the sums; unchanged, unless out is in it.
 * out       (counts[rank]); may be this rank's place in `in`, and nothing else of it.
 * residual  (sum): a rank rounds what it sends to the others. The owner adds up in FP32 and rounds nothing (but
 *           to the dtype). The others do not see whether a sum is finite, and keep what their rounding lost in
 *           any case. With schedule=two_shot each contribution is rounded once whatever the number of ranks, and
 *           the bits are those of gw_allreduce() with "fp32:schedule=two_shot" if the format is "fp32". */
GW_API gw_status gw_reduce_scatter(gw_comm comm, const void* in, void* out, const int64_t* counts,
                                   gw_dtype dtype, gw_op op, const char* spec, float* residual, void* stream);

/* Every rank gets all shards, with the same bits everywhere: what the wire carried, at the owner too.
 *
 * in        (counts[rank]); may be its place in `out`, and nothing else of it. Unchanged if it is not.
 * out       (sum).
 * residual  (counts[rank]). */
GW_API gw_status gw_all_gather(gw_comm comm, const void* in, void* out, const int64_t* counts, gw_dtype dtype,
                               const char* spec, float* residual, void* stream);

/* Brings replicas nearer to their FP32 masters by few bytes: each owner encodes the difference between its
 * master and its own part of the replica, and every rank adds the same decoded difference. So replicas that
 * began with the same bits keep the same bits, and what one call rounds off is in the next one's difference:
 * there is no drift, and no residual to keep. With "fp32" the masters themselves are sent. A format whose
 * encode may lose more than its input ("qsgd:bits=4", "terngrad:clip=off") would drift: GW_BAD_ARGUMENT.
 *
 * master    (counts[rank]) FP32, not in `replica`; unchanged.
 * replica   (sum), the same bits on every rank, for example from gw_all_gather() or gw_broadcast(). A value
 *           that is not finite stays so: gather the masters again.
 * dtype     GW_FLOAT32. GW_UNSUPPORTED for others, which would round each update.
 *
 * Unless the format is "fp32", the communicator keeps (sum) floats of memory for the differences. */
GW_API gw_status gw_all_gather_update(gw_comm comm, const float* master, void* replica, const int64_t* counts,
                                      gw_dtype dtype, const char* spec, void* stream);

/* Every rank gets what `root` has in buf (count), with the same bits everywhere: what the wire carried, at the
 * root too. root: 0 .. world - 1, the same on every rank. There is no residual. */
GW_API gw_status gw_broadcast(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, int root,
                              const char* spec, void* stream);

/* ---- Reducers: a model's gradients, compressed with error feedback ------------------------------------- */

/* One gradient tensor. All entries of an array have the same `size`. */
typedef struct gw_tensor {
  size_t size;      /* sizeof(gw_tensor) */
  const char* name; /* unique in the reducer; for error texts and state; UTF-8 without control characters;
                         copied; null: "tensor 7" */
  int64_t rows;     /* PowerSGD treats it as a (rows, cols) matrix, row-major; a vector has cols == 1. */
  int64_t cols;     /* More dimensions: rows = the first, cols = the product of the rest. 0 is legal. */
  gw_dtype dtype;   /* GW_FLOAT32, GW_BFLOAT16 or GW_FLOAT16: see gw_reducer_allreduce() */
  void* grad;       /* (rows, cols), the gradient's address for gw_reducer_ready(); null if that isn't used */
} gw_tensor;

typedef struct gw_reducer_options {
  size_t size;          /* sizeof(gw_reducer_options) */
  int64_t bucket_bytes; /* tensors are reduced together in buckets of about this size; default 25 MiB */
  int32_t sum;          /* nonzero: return the sum; default: the mean */
  int32_t no_timing;    /* nonzero: gw_stats has no times; default: times are recorded; may differ */
  uint64_t seed;        /* for stochastic rounding; the same on all ranks, which still draw differently */
  int32_t shard;        /* nonzero: each rank gets the mean of its shard only, see gw_reducer_shards(); a wire
                           format then sends half as much. Not in the first headers: a smaller `size` leaves it out */
} gw_reducer_options;

/* Registers a model's gradients. Collective.
 *
 * spec       a wire format of docs/formats.md, such as "fp32" or "bf16:round=stochastic", or
 *            "powersgd:rank=R[,wire=FORMAT][,start=N][,warm=on|off][,alternate=on|off][,min_ratio=X][,seed=S]",
 *            or "randk:ratio=X[,wire=FORMAT][,seed=S]", each with ",ef=on|off",
 *            ",schedule=auto|ring|tree|two_shot|hierarchical|nccl", ",transport=messages|lsa|auto" and
 *            ",intra_node=wire|fp32"; that page explains them. The first schedule=auto on a communicator
 *            between processes measures its links, which takes a tenth of a second at 1 Gb/s.
 * tensors    (n_tensors), in the order in which backward completes them: buckets are reduced in this order.
 *            Names, shapes and order are compared between ranks here; `grad` may differ.
 * options    may be null: defaults.
 * reducer    out; release it with gw_reducer_destroy().
 *
 * Residuals (as large as the gradients) and factors are allocated here, on the communicator's device, and not
 * during a step.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED, GW_NO_MEMORY. */
GW_API gw_status gw_reducer_create(gw_comm comm, const char* spec, const gw_tensor* tensors,
                                   int32_t n_tensors, const gw_reducer_options* options, gw_reducer* reducer);

/* Reduces all gradients in place to the mean (or sum) over ranks, the same bits on every rank. Collective.
 *
 * grads   (n_tensors) addresses, aligned to the element size, null only for an empty tensor. Null: the addresses
 *         of the last call, or those in gw_tensor.grad.
 *         A bucket whose tensors are float32 and contiguous in memory, in the order of registration, is reduced in
 *         place, without a copy. The tensors of any other bucket are copied to memory that buckets share, as large as
 *         the largest two, and back.
 *         bfloat16 and float16 gradients become float32 there: the sums, residuals and factors are float32's, and the
 *         result is rounded to nearest; float16 beyond 65504 is infinity, as loss scaling expects. The wire carries
 *         what the spec says: "bf16" for bfloat16 gradients sends what they have, "fp32" twice the bytes.
 *         Addresses may change between steps and may differ between ranks. If those of a bucket that is
 *         reduced in place change, the call blocks until work in flight is done.
 *
 * A gradient with non-finite values makes the result of its own tensor non-finite on every rank: these
 * elements with a wire format, the whole tensor with "powersgd". It reaches no other tensor and no residual. Other
 * tensors keep every bit, except where they share a block with it in "topk" or a registered format, whose values
 * may be sent in the next step, or in an integer or floating-point wire of "powersgd" and "randk", which may be
 * rounded in other steps. A mean overflows where that of gw_allreduce() does; with "powersgd", a matrix may become NaN in which
 * the norm of a row or column does not fit into float32.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED. */
GW_API gw_status gw_reducer_allreduce(gw_reducer reducer, void* const* grads, void* stream);

/* The same, overlapped with backward, on CUDA and on the host alike: call gw_reducer_ready() for every tensor
 * once its gradient is complete at this point of `stream`, in any order (which may differ), then
 * gw_reducer_wait(). The last tensor of a bucket starts the bucket's reduction, which runs after those of the
 * buckets before it; the call does not wait for it.
 * Addresses are those in gw_tensor.grad, or of the last gw_reducer_allreduce(). On the host, do not write to
 * a gradient between its ready() and wait().
 *
 * GW_BAD_ARGUMENT: no such tensor, ready twice in a step, or its address is unknown. */
GW_API gw_status gw_reducer_ready(gw_reducer reducer, int32_t tensor, void* stream);

/* Ends the step: later work on `stream` sees the reduced gradients (on the host: they are complete on
 * return). Collective. If tensors were not ready, GW_BAD_ARGUMENT names them; mark them ready and call wait()
 * again. */
GW_API gw_status gw_reducer_wait(gw_reducer reducer, void* stream);

/* Elements [begin, end) of a tensor. */
typedef struct gw_range {
  int32_t tensor; /* as registered */
  int64_t begin, end;
} gw_range;

/* The elements whose mean (or sum) this rank finds in its gradients after a step: all of them or, with
 * gw_reducer_options.shard, its part of each bucket, in the order of the tensors. Every element is some rank's.
 * The other elements of a sharded reducer's gradients are unspecified after a step. The ranges stay the same as
 * long as the reducer lives. With "powersgd" and "randk", whose sums all ranks need, the mean is everywhere.
 *
 * ranges    (capacity), may be null if capacity is 0; filled with the first ones.
 * count     out, how many there are.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE. */
GW_API gw_status gw_reducer_shards(gw_reducer reducer, gw_range* ranges, int32_t capacity, int32_t* count);

/* Times and bytes of this rank's last step. */
typedef struct gw_stats {
  size_t size;         /* sizeof(gw_stats), set by the caller */
  int64_t steps;       /* completed so far, including those before a loaded state */
  uint64_t wire_bytes; /* sent in the last step, measured at the transport */
  uint64_t
      dense_bytes; /* what the gradients would have sent as they are, with the requested schedule, or with
                                the one that auto picks for "fp32" */
  double comm_ms;  /* time in which any bucket was in flight: compression and communication */
  double exposed_comm_ms;   /* time the stream of the last wait was stalled by it */
  int64_t extra_bytes;      /* device memory for residuals, other codec state, and staging */
  int32_t buckets;          /* 0 in a world of 1, where nothing is done */
  int32_t buckets_in_place; /* reduced without a copy */
  const char* description;  /* one line per bucket: how it is compressed, which schedules and why; valid
                                until the reducer is destroyed */
} gw_stats;

/* GW_DEVICE_FAILED until the last step has completed: synchronize its stream, or wait for its request, first. */
GW_API gw_status gw_reducer_stats(gw_reducer reducer, gw_stats* stats);

/* A checkpoint of this rank's codec state (residuals, factors, ...) and step count. Loaded into a reducer
 * created with the same spec, tensors (in any order), options, rank and world size, it lets training resume
 * bit for bit. Only between steps; waits for work in flight. Every rank saves and loads its own.
 * docs/checkpoints.md describes the layout. In a world of 1 the state contains the step count and the rest
 * of a residual that was loaded there.
 *
 * size: out, in bytes. */
GW_API gw_status gw_reducer_state_size(gw_reducer reducer, size_t* size);
/* Writes gw_reducer_state_size() bytes to host memory; `size` is the size of the buffer. */
GW_API gw_status gw_reducer_state_save(gw_reducer reducer, void* state, size_t size);
/* Loads `state`, in host memory, which this rank saved in a world of this size. A survivor of
 * gw_comm_shrink() or a rank of gw_comm_grow() may also load the state that it saved in the previous world,
 * where it may have had another rank number.
 *
 * From another world, the rank's whole residual is loaded, in units of its gradient, so that
 *
 *     sum over ranks of residual_new  +  world * mean  ==  sum over ranks of (gradient + residual_old)
 *
 * holds for the current ranks and the current world. Factors, the same on every rank, are kept. The residual
 * of a lost rank is lost, unless its state is available: then gw_reducer_state_load_ranks() on every rank
 * keeps it. In a world of 1, where nothing is sent, the next step adds the residual to the gradients.
 *
 * The next step blocks the caller while ranks compare the loaded states. It fails with GW_COMM_FAILED on
 * every rank unless all ranks have loaded a state of the same step and run. It also fails if two ranks have
 * loaded the residual of the same rank. GW_BAD_ARGUMENT if the state is damaged, or belongs to another spec
 * or tensor, or to another rank of a world of this size: the text says which, and the reducer is unchanged. */
GW_API gw_status gw_reducer_state_load(gw_reducer reducer, const void* state, size_t size);

/* The same from the states of a run with any number of ranks, in any order: all of them, or at least those of the
 * ranks r, r + world, r + 2 world, ... for rank r of now. The sum of their residuals becomes this rank's, so the sum
 * over all ranks is kept; with more ranks than before, the new ones begin with none. Factors, the same on every
 * rank, are kept. With as many ranks as before each gets its own state back, bit for bit. A rank alone sends
 * nothing: its next step adds the sum to the gradients.
 *
 * states, sizes  (n) */
GW_API gw_status gw_reducer_state_load_ranks(gw_reducer reducer, const void* const* states,
                                             const size_t* sizes, int32_t n);

/* Waits for work in flight, then frees the reducer. Null does nothing. */
GW_API gw_status gw_reducer_destroy(gw_reducer reducer);

#ifdef __cplusplus
}
#endif

#endif /* GRADWIRE_H */
