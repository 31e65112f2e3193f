/** @file
 * Gradwire's C ABI: gradients averaged over many processes with few bytes on the wire.
 *
 * Three calls suffice: gw_comm_create() once per process, gw_reducer_create() once per model, and
 * gw_reducer_allreduce() in every step. docs/extending.md is the tutorial.
 *
 * - **Status.** Every function returns a gw_status, except the three that report versions and errors. The
 *   library throws no exceptions and never ends the process. After a status other than #GW_OK,
 *   gw_last_error() returns the error and the remedy. Outputs are written only on #GW_OK.
 * - **Handles.** gw_comm, gw_reducer and gw_request are numbers, not addresses. An invalid handle gives
 *   #GW_BAD_HANDLE, never a crash. A handle belongs to the process that created it, not to its forks.
 * - **Threads.** Any thread may call any function. Calls on one communicator and its reducers are serialized,
 *   except gw_comm_abort().
 * - **Order.** All ranks of a communicator must make the collective calls (marked as such) in the same order
 *   and with the same arguments, except those marked "may differ". Ranks that disagree get #GW_COMM_FAILED
 *   with a text that names both calls. Only gw_call_options::tag distinguishes calls that differ
 *   only in their addresses.
 * - **Failure.** A missed deadline, a dead peer, a disagreement or gw_comm_abort() is final for the
 *   communicator: every pending and later call fails on every reachable rank. Then destroy the communicator
 *   and create another communicator, or continue with the surviving ranks: gw_comm_shrink().
 * - **Streams.** On a CUDA device, `stream` is a cudaStream_t cast to void* (null: the legacy default
 *   stream). Calls enqueue work and return; later work on that stream sees the results. During a stream's
 *   capture they return #GW_UNSUPPORTED. No call changes the thread's current device. On the host `stream`
 *   must be null, and a call blocks until its result is ready, unless it has a gw_request.
 * - **Memory.** Gradient memory belongs to the caller and is on the communicator's device. It must stay valid
 *   until the stream has passed the call that used it, or until the call's gw_request is done.
 * - **Structs.** Zero the struct, set `size` to its sizeof, then fill it in; zero means the default. So
 *   programs that were compiled with an older header keep working.
 * - **Errors.** Every function that takes a handle may return #GW_BAD_HANDLE, and every function
 *   #GW_NO_MEMORY; the descriptions below do not repeat them.
 */
#ifndef GRADWIRE_H
#define GRADWIRE_H

#include <stddef.h>
#include <stdint.h>

/** Major version of this header. */
#define GW_VERSION_MAJOR 0
/** Minor version of this header. Below 1.0, a new minor version may change the ABI. */
#define GW_VERSION_MINOR 2
/** Patch version of this header. */
#define GW_VERSION_PATCH 0

#if defined(__GNUC__)
#define GW_API __attribute__((visibility("default")))
#else
#define GW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Result of a call: #GW_OK or one of the other constants below. */
typedef int32_t gw_status;
/** Values of gw_status. */
enum {
  /** Success. */
  GW_OK = 0,
  /** An argument is null, out of range, or a string that does not parse. */
  GW_BAD_ARGUMENT = 1,
  /** The handle is null, not a handle, of the wrong kind, destroyed, or from another process. */
  GW_BAD_HANDLE = 2,
  /** A deadline, a dead peer, a disagreement, an abort, or a failed callback of gw_format or gw_store. Final
   * for the communicator. */
  GW_COMM_FAILED = 3,
  /** A CUDA call failed, or the device does not exist. */
  GW_DEVICE_FAILED = 4,
  /** Valid, but not supported by this version or build. */
  GW_UNSUPPORTED = 5,
  /** Out of host or device memory, threads or file descriptors. */
  GW_NO_MEMORY = 6,
  /** A bug in the library. */
  GW_INTERNAL = 7,
  /** gw_request_wait() only: timed out; the call is still running. */
  GW_NOT_DONE = 8
};

/** Type of elements. */
typedef int32_t gw_dtype;
/** Values of gw_dtype. */
enum {
  /** IEEE 754 single precision. */
  GW_FLOAT32 = 0,
  /** bfloat16. Converted to float32 for the reduction, and back. */
  GW_BFLOAT16 = 1,
  /** IEEE 754 half precision. Converted to float32 for the reduction, and back. */
  GW_FLOAT16 = 2
};

/** Reduction. */
typedef int32_t gw_op;
/** Values of gw_op. */
enum {
  /** The sum over ranks. A sum beyond float32 (3.4e38) is infinity. */
  GW_SUM = 0,
  /** The mean over ranks. Finite wherever float32 can hold the mean, even if float32 cannot hold the sum;
   * docs/numerics.md lists the exceptions. */
  GW_AVG = 1
};

/** The device number of host memory and threads. */
#define GW_HOST (-1)

/** A communicator: this process's membership in a group of ranks. */
typedef struct gw_comm_handle* gw_comm;
/** A model's gradients, reduced together with compression and error feedback. */
typedef struct gw_reducer_handle* gw_reducer;
/** A collective call on the host that returned before its result was ready. */
typedef struct gw_request_handle* gw_request;

/** @name Version and errors
 * These functions cannot fail and return no status.
 * @{ */

/** Returns the version of the loaded library.
 *
 * @return major * 10000 + minor * 100 + patch, of the same form as GW_VERSION_MAJOR, GW_VERSION_MINOR and
 *         GW_VERSION_PATCH combined.
 */
GW_API int gw_version(void);

/** Returns the name of a status.
 *
 * @param status  any number.
 * @return a constant such as "GW_BAD_HANDLE"; never null.
 */
GW_API const char* gw_status_string(gw_status status);

/** Returns the error text of this thread's last failed call.
 *
 * @return "" if no call has failed; never null. A longer text ends after 2,047 bytes with "...". Valid until
 *         this thread's next failing call.
 */
GW_API const char* gw_last_error(void);

/** @}
 * @name Communicators
 * @{ */

/** A key-value store that all ranks reach: the store of torch.distributed, etcd, a table that MPI broadcasts.
 *
 * gw_comm_create() calls the callbacks on its own thread, and only before it returns: rank 0's set() once,
 * the other ranks' get() until they have reached rank 0, at most 50 times a second. The callbacks must not
 * throw.
 */
typedef struct gw_store {
  /** sizeof(gw_store) */
  size_t size;
  /** Stores `value` (`bytes` bytes, not empty) under `key` (printable ASCII without spaces), where every
   * rank's get() finds it, within timeout_ms > 0. Returns null, or an error text, which is copied. */
  const char* (*set)(void* user, const char* key, const void* value, size_t bytes, int64_t timeout_ms);
  /** Waits until `key` is set. Writes as much of the value as fits to `value` (`capacity` bytes), and the
   * size of the whole value to `*bytes`, which is 0 on entry and stays 0 if the key is not set in time.
   * Returns as set(). */
  const char* (*get)(void* user, const char* key, int64_t timeout_ms, void* value, size_t capacity,
                     size_t* bytes);
  /** Passed to both callbacks. */
  void* user;
  /** Prefix of the key; null: none. Use a new prefix for each communicator that is made through the same
   * store. */
  const char* prefix;
} gw_store;

/** How to create a communicator. At most one of `rendezvous`, `store`, `nccl_comm` and `invitation` is set;
 * all may be null if `world` is 1. The strings are copied. */
typedef struct gw_comm_options {
  /** sizeof(gw_comm_options) */
  size_t size;

  /** How the ranks find each other, the same on every rank:
   *
   * - "tcp://HOST:PORT": processes on any machines; rank 0 listens on PORT of HOST. A secret is required if
   *   other machines can reach HOST.
   * - "file:///PATH": processes that share a directory; rank 0 creates and removes PATH in it.
   * - "nccl://": processes with one GPU each, through HOST:PORT of the environment variable NCCL_COMM_ID.
   * - "local://NAME": threads of one process, one per rank.
   *
   * Processes on GPUs communicate through NCCL, processes on the host through TCP. The name is free again
   * once the group has formed. */
  const char* rendezvous;

  /** In place of a rendezvous: a key-value store of the caller. Rank 0 sets one key, `prefix` and
   * "gradwire/rendezvous", to its addresses and a fresh random secret. So any process that can read the store
   * may join, unless a secret is set in addition. The store is not used after gw_comm_create() returns; keys
   * are not deleted. */
  const gw_store* store;

  /** In place of a rendezvous: an ncclComm_t cast to void*, which remains the caller's and must outlive the
   * communicator. `rank` and `world` must be 0; `device` is the device of the ncclComm_t.
   *
   * Gradwire never aborts this ncclComm_t: after `timeout_ms` calls fail, but enqueued work waits until the
   * owner aborts it. No other thread may use it during a call. Between calls, others may use it on another
   * stream only in an order that is the same on every rank. */
  void* nccl_comm;

  /** In place of a rendezvous: the gw_comm_info::invitation of any rank of a running group, which this
   * process joins when the ranks call gw_comm_grow(). `rank`, `world` and `ranks_per_node` must be 0, and
   * `device` #GW_HOST. The communicator is shrinkable. */
  const char* invitation;

  /** 0 .. world - 1, each exactly once. */
  int32_t rank;
  /** Number of ranks, 1 .. 65536; the same on every rank. */
  int32_t world;
  /** #GW_HOST on all ranks, or the number of a CUDA device of this process, which may differ. There is no
   * default: 0 is the first CUDA device. */
  int32_t device;
  /** Placement of ranks on nodes: rank = node * ranks_per_node + local index. Must divide `world`; the same
   * on every rank. 0: unknown. schedule=hierarchical requires it, and schedule=auto considers it. */
  int32_t ranks_per_node;

  /** > 0: the longest wait for a peer in milliseconds, while joining and later in any operation. May differ:
   * each rank applies its own. Time during which this process is stopped does not count. */
  int64_t timeout_ms;

  /** A text that every rank must know, with tcp://, file://, a store or an invitation; the same on every
   * rank. Null: the environment's GRADWIRE_SECRET, or none. docs/running.md describes what the secret
   * protects. */
  const char* secret;

  /** The network interface, such as "eth1", at which this process listens for the other ranks' data, on the
   * host with tcp://, file://, a store or an invitation. It also applies to communicators that are made from
   * this one. Null: GRADWIRE_INTERFACE, else with tcp:// the interface that reaches rank 0, otherwise all
   * interfaces. May differ. */
  const char* interface;
  /** First and last port of the range at which this process listens there; the first free port is used. 0 and
   * 0: GRADWIRE_PORTS, else any port. `shrinkable` uses one more port, and rank 0's store another, except
   * that of tcp://. May differ. */
  int32_t ports[2];

  /** Nonzero: the ranks can continue after a failure, and admit new ranks: see gw_comm_shrink() and
   * gw_comm_grow(). The same on every rank. Requires tcp://, file://, a store or a world of 1, and on GPUs
   * NCCL 2.28.7; otherwise #GW_UNSUPPORTED. */
  int32_t shrinkable;

  /** Lets another thread cancel gw_comm_create(): when `*cancel` is not 0, the call fails with
   * #GW_COMM_FAILED within seconds. The flag must stay valid until the call returns. Null: not cancellable.
   */
  const volatile int32_t* cancel;
} gw_comm_options;

/** Joins a group of ranks. Collective: blocks until all ranks have joined.
 *
 * @param options  see gw_comm_options.
 * @param comm     out; release it with gw_comm_destroy().
 * @return #GW_BAD_ARGUMENT, also if the interface does not exist or the running group rejects this process;
 *         #GW_COMM_FAILED if a rank did not join, a callback of the store failed, the store's key has another
 *         content, no port of the range is free, or the running group does not admit this process in time;
 *         #GW_DEVICE_FAILED; #GW_UNSUPPORTED.
 */
GW_API gw_status gw_comm_create(const gw_comm_options* options, gw_comm* comm);

/** Divides a communicator into parts: the ranks that pass the same color form a new communicator, ordered by
 * key, then by their rank in `comm`. Collective over `comm`.
 *
 * The part is independent of `comm`, which may be destroyed first; neither is affected by the other's
 * failures. The part's number of ranks per node is unknown. Between GPUs NCCL splits the group, errors of the
 * part name fewer ranks, and calls that differ between its ranks are not compared.
 *
 * @param comm   the communicator to divide.
 * @param color  0 or more; negative: this rank joins no part, and `*part` is null. May differ.
 * @param key    any number. May differ.
 * @param part   out; release it with gw_comm_destroy().
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED.
 */
GW_API gw_status gw_comm_split(gw_comm comm, int color, int key, gw_comm* part);

/** Makes a communicator of the surviving ranks of a failed communicator. Survivors are the ranks that call
 * this function, even without rank 0. Collective over the survivors. Fails a communicator that has not failed
 * yet.
 *
 * At most one group survives (no split brain): ranks that do not answer in time, or that may be the smaller
 * part, get #GW_COMM_FAILED. Of the ranks whose processes have not ended, the smaller part has fewer than
 * half of the ranks, or half of the ranks without the lowest rank.
 *
 * Results of the failed call, and the state of a reducer whose call failed, are undefined. To repeat a step,
 * keep the gradients and a gw_reducer_state_save() from before the step, and load that state into a reducer
 * of `*rest` with gw_reducer_state_load(). The residuals of a lost rank are lost.
 *
 * @param comm        created with gw_comm_options::shrinkable. Afterwards `comm` and its reducers can only be
 *                    destroyed.
 * @param timeout_ms  > 0: how long to wait for ranks that are alive but do not call this, in milliseconds. A
 *                    rank whose process has ended is not waited for. Finding out who answers takes 1 s more,
 *                    and connecting the survivors up to 5 s. May differ.
 * @param cancel      as gw_comm_options::cancel; null: not cancellable.
 * @param rest        out: can shrink in turn. Its number of ranks per node is unknown.
 * @param ranks       out: the survivors' ranks in `comm`, ascending: ranks[i] is rank i of `*rest`. May be
 *                    null. If a gw_comm_grow() failed here and succeeded elsewhere, new ranks may follow,
 *                    whose rank in `comm` is -1.
 * @param capacity    elements of `ranks`: at least the world of `comm`, unless `ranks` is null.
 * @return #GW_BAD_ARGUMENT; #GW_COMM_FAILED, after which it may be called again if a rank was late.
 */
GW_API gw_status gw_comm_shrink(gw_comm comm, int64_t timeout_ms, const volatile int32_t* cancel,
                                gw_comm* rest, int32_t* ranks, int32_t capacity);

/** Admits new processes: from now on new processes may ask to join, until there are `most` ranks.
 *
 * Call this function on every rank, because any rank may become rank 0. The setting also holds for the
 * communicators that gw_comm_shrink() and gw_comm_grow() make of this communicator.
 *
 *     the ranks                                              a new process
 *     gw_comm_admit(comm, 4)
 *     gw_comm_query(comm, &info), send info.invitation       gw_comm_create(&options, &comm) waits
 *     ... calls; rank 0 sees info.joiners > 0 and notifies the others
 *     gw_comm_grow(comm, &grown)                             returns as a rank of `grown`
 *     gw_comm_destroy(comm)
 *
 * @param comm  created with gw_comm_options::shrinkable.
 * @param most  the largest number of ranks, joiners included; 0 ends admission and notifies waiting
 *              processes. May differ: rank 0's counts.
 * @return #GW_BAD_ARGUMENT, also if the communicator is not shrinkable.
 */
GW_API gw_status gw_comm_admit(gw_comm comm, int32_t most);

/** Makes a communicator of the ranks of `comm`, followed by the processes that wait to join. Collective.
 * Takes up to 10 s if a waiting process hangs.
 *
 * The caller sends a new rank the state that it needs, for example weights by gw_broadcast() over `*grown`.
 * The ranks save the state of their reducers before this call and load it into reducers of `*grown` with
 * gw_reducer_state_load(). The new rank loads a copy of one of these states with
 * gw_reducer_state_load_ranks(), n = 1; its residuals start at 0.
 *
 * @param comm   created with gw_comm_options::shrinkable.
 * @param grown  out: can grow and shrink in turn; its number of ranks per node is unknown. Afterwards `comm`
 *               and its reducers can only be destroyed. Null if no process joined: then `comm` remains in
 *               use.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED.
 */
GW_API gw_status gw_comm_grow(gw_comm comm, gw_comm* grown);

/** Describes a communicator. */
typedef struct gw_comm_info {
  /** sizeof(gw_comm_info), set by the caller. */
  size_t size;
  /** This process's rank. */
  int32_t rank;
  /** Number of ranks. */
  int32_t world;
  /** #GW_HOST, or the number of a CUDA device. */
  int32_t device;
  /** gw_comm_options::ranks_per_node; 0: unknown. */
  int32_t ranks_per_node;
  /** Payload that this rank has sent so far, in bytes. */
  uint64_t bytes_sent;
  /** "local", "tcp" or "nccl"; static. */
  const char* transport;
  /** For gw_comm_options::invitation of a process that wants to join: the addresses of the ranks, and with
   * file:// the group's random secret. So show it only to processes that may join. It is valid while one of
   * its ranks is alive. Null if the communicator is not shrinkable. The string lives until the communicator
   * is destroyed. */
  const char* invitation;
  /** Processes that wait to join. Rank 0 counts them; 0 on other ranks. */
  int32_t joiners;
} gw_comm_info;

/** Describes a communicator. Communicates with no other rank; may be called often.
 *
 * @param comm  the communicator.
 * @param info  out; its `size` is set.
 * @return #GW_BAD_ARGUMENT.
 */
GW_API gw_status gw_comm_query(gw_comm comm, gw_comm_info* info);

/** Returns whether a communicator has failed. A CUDA stream carries no errors: when an operation on it is
 * abandoned, the stream continues with garbage in the buffers. So synchronize, then check, and only then use
 * the results. On the host the failing calls report errors themselves.
 *
 * @param comm  the communicator.
 * @return #GW_COMM_FAILED, with the reason as error text, once the communicator has failed; otherwise #GW_OK.
 */
GW_API gw_status gw_comm_check(gw_comm comm);

/** Fails all pending operations of the communicator, on this rank and on all reachable ranks. Suitable for
 * watchdogs: never blocks, and any thread may call this function.
 *
 * @param comm    the communicator.
 * @param reason  part of the error texts; may be null.
 * @return #GW_OK.
 */
GW_API gw_status gw_comm_abort(gw_comm comm, const char* reason);

/** Releases the handle; the group itself lives until its last reducer is destroyed as well. Blocks until work
 * in flight is done; to avoid the wait, abort first.
 *
 * @param comm  may be null, which does nothing.
 * @return #GW_BAD_ARGUMENT in a callback of gw_format.
 */
GW_API gw_status gw_comm_destroy(gw_comm comm);

/** @}
 * @name Requests
 * Calls on the host that return at once. Any collective call with an argument or option of type gw_request*
 * can be one:
 *
 *     gw_call_options options = {.size = sizeof options};
 *     gw_request request;
 *     options.request = &request;
 *     gw_allreduce(comm, gradients, n, GW_FLOAT32, GW_AVG, "int8", NULL, &options);
 *     ...                                  // the gradients are in use
 *     gw_request_wait(request, 1000);
 *     gw_request_destroy(request);
 *
 * Calls run one after another in the order in which they were made, with or without requests, and each has
 * the communicator's deadline. The first call with a buffer, and a change of a residual's address, block
 * until calls in flight are done. On a CUDA device a request is #GW_UNSUPPORTED, because streams provide the
 * same.
 * @{ */

/** Blocks until the result is ready, at most timeout_ms. Several threads may wait at the same time.
 *
 * @param request     of any call.
 * @param timeout_ms  0 or more; 0 only tests whether the result is ready.
 * @return #GW_NOT_DONE if the call is still running, after which one may wait again; #GW_COMM_FAILED if the
 *         call has failed; #GW_BAD_ARGUMENT.
 */
GW_API gw_status gw_request_wait(gw_request request, int64_t timeout_ms);

/** Frees the request. Blocks until the call is done; to avoid the wait, gw_comm_abort() first.
 *
 * @param request  may be null, which does nothing.
 * @return #GW_OK.
 */
GW_API gw_status gw_request_destroy(gw_request request);

/** @}
 * @name Registered formats
 * @{ */

/** A wire format: a block of values becomes bytes.
 *
 * Both callbacks return null, or an error text, which is copied. Then that call and all later calls of the
 * communicator fail with #GW_COMM_FAILED and this text, on every rank; so they do if a callback writes
 * outside of its blocks. Callbacks must not throw, nor call functions on the communicator that they work for.
 * Several threads may call them at the same time.
 */
typedef struct gw_format {
  /** sizeof(gw_format) */
  size_t size;
  /** The format's name in specs: 1 to 64 letters, digits and '_'; copied. */
  const char* name;
  /** Values of a block, 1 to 65536. */
  int64_t block;
  /** Bytes of an encoded block, 1 to 1048576. */
  int64_t bytes;
  /** Encodes `values` (blocks, block) to `bytes` (blocks, bytes), without gaps; up to 2^20 values per call.
   * The last block of a chunk is padded with zeros, and bytes that encode does not write are 0. Values may be
   * NaN or infinite. */
  const char* (*encode)(void* user, const float* values, int64_t blocks, uint8_t* bytes);
  /** Decodes `bytes` to `values`, the reverse. The result must depend on the bytes alone, so that all ranks
   * end with the same bits. Where the value was NaN or infinite it should be NaN, perhaps in the whole
   * block. */
  const char* (*decode)(void* user, const uint8_t* bytes, int64_t blocks, float* values);
  /** Passed to both callbacks; must stay valid until the process ends. */
  void* user;
} gw_format;

/** Registers a format in this process under its name, which can then appear in every spec: "mine",
 * "mine:schedule=ring,ef=off", "powersgd:rank=4,wire=mine". Register it on every rank: ranks whose block or
 * bytes differ get #GW_COMM_FAILED in the first call that uses the format.
 *
 * Registering a name again with the same block and bytes replaces the callbacks; other threads may still be
 * running the previous ones. The callbacks are tested on a few random blocks. Host only.
 *
 * @param format  see gw_format; copied.
 * @return #GW_BAD_ARGUMENT: a bad name, one of Gradwire's own formats, or other block or bytes than the
 *         registered ones; a callback failed, wrote outside of its blocks, or left a part of them unwritten.
 */
GW_API gw_status gw_format_register(const gw_format* format);

/** @}
 * @name Collectives on the caller's memory
 * @{ */

/** Options of one collective call. */
typedef struct gw_call_options {
  /** sizeof(gw_call_options) */
  size_t size;
  /** A name for the call, for example of its tensor: at most 1000 bytes of UTF-8 without control characters;
   * copied. Null or "": none. Ranks compare it along with the call's arguments, and error texts quote it.
   *
   * If two ranks make two calls of equal size in different orders, tags turn that into an error on every
   * rank. Without tags each rank gets sums of unrelated tensors. So tag all calls where a scheduler, a
   * compiler or several threads decide their order. Between GPUs (NCCL), ranks compare a call only the first
   * time it is made. */
  const char* tag;
  /** Error feedback, for gw_allreduce(), gw_reduce_scatter() and gw_all_gather(): FP32 memory of the caller
   * on the communicator's device, zeros at first, which holds what this rank's rounding has lost so far.
   * Null: no error feedback. May differ.
   *
   * The residual is added before the next encode and replaced by what that encode loses, so the same values
   * must be paired with the same residual in every call. The sum over ranks of values and residuals before a
   * call equals the sum of results and residuals after it, to FP32 rounding. With ",ef_decay=D" in the spec
   * the residual is first multiplied by D. Unused with "fp32". */
  float* residual;
  /** Out, on the host: the call returns when it has begun, and the request represents it; see
   * gw_request_wait(). Release it with gw_request_destroy(). Null: the call blocks until its result is ready.
   */
  gw_request* request;
} gw_call_options;

/** Sums or averages buf over all ranks, in place; every rank ends with the same bits. Collective.
 *
 * The program for a buffer and tag is built at first use and cached (the 256 most recently used): reuse both.
 * A new buffer blocks the caller until work in flight is done. In a world of 1, buf is left unchanged.
 *
 * Where a result is not finite, its residual becomes 0 on every rank. An element that shares a block with a
 * non-finite element may be sent in the next call instead.
 *
 * @param comm     the communicator.
 * @param buf      (count) elements of dtype on the communicator's device, aligned to the element size. May be
 *                 null when count is 0. The address may differ.
 * @param count    number of elements.
 * @param dtype    type of the elements. A sum beyond float16 is infinity there.
 * @param op       #GW_SUM or #GW_AVG.
 * @param spec     a format of docs/formats.md, such as "fp32" or "bf16:round=stochastic,schedule=tree", or
 *                 your own. "powersgd" and "randk" need a reducer. ef= has no effect: there is error
 *                 feedback if options->residual is set. Formats whose encode may lose more than its input,
 *                 such as "qsgd:bits=4", take no residual.
 * @param stream   see the top; may differ.
 * @param options  may be null: no tag, no residual, no request. The residual has (count) elements.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_allreduce(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, gw_op op,
                              const char* spec, void* stream, const gw_call_options* options);

/** Sums or averages over all ranks; each rank gets its shard of the result. Collective. In a world of 1 it
 * copies, whatever the spec.
 *
 * A rank rounds what it sends to the others. The owner of a shard adds up in FP32 and rounds only to the
 * dtype. The bits of "fp32" are those of gw_allreduce() with "fp32:schedule=two_shot".
 *
 * Programs are cached by all arguments but the addresses. On a CUDA device a change of address blocks the
 * caller until work in flight is done.
 *
 * @param comm     the communicator.
 * @param in       (sum of counts) elements: this rank's contribution. Unchanged, unless `out` is part of it.
 *                 The address may differ.
 * @param out      (counts[rank]) elements. It may be this rank's shard of `in`, but not otherwise overlap it.
 *                 The address may differ.
 * @param counts   (world) elements of each rank's shard: any size, including 0; the same on every rank.
 *                 Shards lie one after another in rank order.
 * @param dtype    type of the elements. The wire carries what `spec` says: "bf16" for bfloat16 elements is
 *                 lossless, "fp32" sends twice the bytes.
 * @param op       #GW_SUM or #GW_AVG.
 * @param spec     as in gw_allreduce(). schedule=tree is rejected unless it fits.
 * @param stream   see the top; may differ.
 * @param options  may be null. The residual has (sum of counts) elements.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_reduce_scatter(gw_comm comm, const void* in, void* out, const int64_t* counts,
                                   gw_dtype dtype, gw_op op, const char* spec, void* stream,
                                   const gw_call_options* options);

/** Gathers the shards of all ranks on every rank. Collective. The bits are the same everywhere: all ranks,
 * including the owner, get the transmitted values. In a world of 1 it copies, whatever the spec.
 *
 * @param comm     the communicator.
 * @param in       (counts[rank]) elements: this rank's shard. It may be this rank's shard of `out`, but not
 *                 otherwise overlap it; elsewhere it is unchanged. The address may differ.
 * @param out      (sum of counts) elements. The address may differ.
 * @param counts   as in gw_reduce_scatter().
 * @param dtype    as in gw_reduce_scatter().
 * @param spec     as in gw_reduce_scatter().
 * @param stream   see the top; may differ.
 * @param options  may be null. The residual has (counts[rank]) elements.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_all_gather(gw_comm comm, const void* in, void* out, const int64_t* counts, gw_dtype dtype,
                               const char* spec, void* stream, const gw_call_options* options);

/** Moves replicas toward their FP32 masters with few bytes: each owner encodes the difference between its
 * master and its own part of the replica, and every rank adds the same decoded difference. Collective.
 *
 * Replicas that began with the same bits keep the same bits, and what one call rounds off is part of the next
 * call's difference: there is no drift, and no residual to keep. With "fp32" the masters themselves are sent;
 * otherwise the communicator keeps (sum of counts) floats of memory for the differences.
 *
 * @param comm     the communicator.
 * @param master   (counts[rank]) FP32 elements: this rank's shard; not in `replica`. Unchanged. The address
 *                 may differ.
 * @param replica  (sum of counts) elements, the same bits on every rank, for example from gw_all_gather() or
 *                 gw_broadcast(). A value that is not finite stays so: gather the masters again. The address
 *                 may differ.
 * @param counts   as in gw_reduce_scatter().
 * @param dtype    #GW_FLOAT32. #GW_UNSUPPORTED for others, which would round each update.
 * @param spec     as in gw_reduce_scatter(). A format whose encode may lose more than its input is rejected.
 * @param stream   see the top; may differ.
 * @param options  may be null; without a residual.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_all_gather_update(gw_comm comm, const float* master, void* replica, const int64_t* counts,
                                      gw_dtype dtype, const char* spec, void* stream,
                                      const gw_call_options* options);

/** Copies buf of rank `root` to every rank. Collective. The bits are the same everywhere: all ranks,
 * including the root, get the transmitted values.
 *
 * @param comm     the communicator.
 * @param buf      (count) elements of dtype. The address may differ.
 * @param count    number of elements.
 * @param dtype    as in gw_reduce_scatter().
 * @param root     0 .. world - 1; the same on every rank.
 * @param spec     as in gw_reduce_scatter().
 * @param stream   see the top; may differ.
 * @param options  may be null; without a residual.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_broadcast(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, int root,
                              const char* spec, void* stream, const gw_call_options* options);

/** @}
 * @name Reducers
 * A model's gradients, compressed with error feedback.
 * @{ */

/** One gradient tensor. All elements of an array have the same `size`. */
typedef struct gw_tensor {
  /** sizeof(gw_tensor) */
  size_t size;
  /** Unique in the reducer; for error texts and state. UTF-8 without control characters; copied. Null:
   * "tensor 7". */
  const char* name;
  /** PowerSGD treats the tensor as a (rows, cols) matrix, row-major. With more dimensions, rows is the first
   * dimension. */
  int64_t rows;
  /** The product of the other dimensions; 1 for a vector. 0 is valid. */
  int64_t cols;
  /** Type of the elements; see gw_reducer_allreduce(). */
  gw_dtype dtype;
  /** (rows, cols) elements: the gradient's address for gw_reducer_ready(); null if that is not used. May
   * differ. */
  void* grad;
} gw_tensor;

/** Options of a reducer. */
typedef struct gw_reducer_options {
  /** sizeof(gw_reducer_options) */
  size_t size;
  /** Tensors are reduced together in buckets of about this size in bytes; default: 25 MiB. */
  int64_t bucket_bytes;
  /** Nonzero: return the sum; default: the mean. */
  int32_t sum;
  /** Nonzero: gw_stats has no times; default: times are recorded. May differ. */
  int32_t no_timing;
  /** For stochastic rounding; the same on all ranks, which still draw differently. */
  uint64_t seed;
  /** Nonzero: each rank gets the mean of its shard only, see gw_reducer_shards(); a wire format then sends
   * half as much. */
  int32_t shard;
  /** A name for the reducer: as gw_call_options::tag, for all its calls. */
  const char* tag;
  /** Nonzero: a tensor whose gradient is zero on every rank counts as unused in this step. Its gradient stays
   * zero, and its residual, momentum and factors keep their bits. gw_reducer_wait() treats tensors that were
   * not marked ready as zero. For models whose steps use some of their tensors: each bucket exchanges a float
   * per tensor more and, on CUDA, the host waits for it. */
  int32_t skip_unused;
} gw_reducer_options;

/** Registers a model's gradients. Collective. Residuals (as large as the gradients) and factors are allocated
 * here, on the communicator's device, and not during a step.
 *
 * @param comm       the communicator.
 * @param spec       a spec of docs/formats.md, such as "bf16" or "powersgd:rank=4,wire=int8". The first
 *                   schedule=auto on a communicator of more than two processes measures its links, for at
 *                   most 0.3 s and 5 % of timeout_ms if round trips take less than 5 ms. A named schedule
 *                   measures nothing.
 * @param tensors    (n_tensors), in the order in which backward completes them: buckets are reduced in this
 *                   order. Ranks compare names, shapes and order here. Copied.
 * @param n_tensors  0 or more.
 * @param options    may be null: defaults.
 * @param reducer    out; release it with gw_reducer_destroy().
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED.
 */
GW_API gw_status gw_reducer_create(gw_comm comm, const char* spec, const gw_tensor* tensors,
                                   int32_t n_tensors, const gw_reducer_options* options, gw_reducer* reducer);

/** What a spec does to a tensor. */
typedef struct gw_spec_info {
  /** sizeof(gw_spec_info), set by the caller. */
  size_t size;
  /** "powersgd", "randk", "dion", or the name of a wire format. */
  const char* method;
  /** The spec of the messages: "int8" of "powersgd:wire=int8", with its options and the schedule. For a wire
   * format the spec without options of a reducer. Valid until this thread's next call of this function. */
  const char* wire;
  /** Bits per value of the messages, on average over 2^20 values. */
  double bits;
  /** Nonzero: messages lose nothing but FP32 rounding of sums. */
  int32_t exact;
  /** Nonzero: dense=auto means the tensor: a vector, which has one row or column, of at most 65,536 elements,
   * or a matrix of fewer than 1,024 elements. It is the default of formats of fewer than 8 bits. */
  int32_t small;
  /** Rank of the tensor's factors; 0: "powersgd" and "dion" do not compress the tensor, or another method. */
  int32_t rank;
  /** Nonzero: alternate=on. */
  int32_t alternate;
  /** The option start=. */
  int64_t start;
  /** The option seed=. */
  uint64_t seed;
} gw_spec_info;

/** Parses a spec, and tells what it does to a (rows, cols) tensor: see gw_tensor.
 *
 * @param spec  as for gw_reducer_create().
 * @param rows  0 or more.
 * @param cols  0 or more.
 * @param info  out; its `size` is set.
 * @return #GW_BAD_ARGUMENT: the spec is invalid.
 */
GW_API gw_status gw_spec_query(const char* spec, int64_t rows, int64_t cols, gw_spec_info* info);

/** The specs that gw_choose() compares, and the step in which the gradients are reduced. */
typedef struct gw_choose_options {
  /** sizeof(gw_choose_options) */
  size_t size;
  /** (n_specs) specs as for gw_reducer_create(). The first one is kept where no other is faster, and need not
   * be within `error`; usually "fp32". */
  const char* const* specs;
  /** Number of specs: 1 to 1000. */
  int32_t n_specs;
  /** The largest relative L2 error of one encode that the choice may have; default: 0.1. */
  double error;
  /** gw_reducer_options::bucket_bytes of the reducer; default: 25 MiB. */
  int64_t bucket_bytes;
  /** gw_reducer_options::seed of the reducer. */
  uint64_t seed;
  /** Milliseconds of a step without communication; default: 0. Steps that differ by less than 5 % count as
   * equal, so a long step prefers small errors. May differ; the mean over the ranks counts. */
  double compute_ms;
  /** Milliseconds of the part of compute_ms during which gw_reducer_ready() marks gradients as complete, and
   * which hides communication; default: 0, for gw_reducer_allreduce(). May differ as `compute_ms`. */
  double backward_ms;
} gw_choose_options;

/** What gw_choose() measured for a spec: means over the ranks. */
typedef struct gw_trial {
  /** Relative L2 error of one encode: the root mean square over all elements of the error of their tensor,
   * without tensors of zeros. NaN: the spec made finite gradients not finite. */
  double error;
  /** Milliseconds of reducing all gradients: compression and communication. */
  double communicate_ms;
  /** Milliseconds of `communicate_ms` that backward_ms does not hide. */
  double exposed_ms;
} gw_trial;

/** Chooses the spec for a reducer: of those within the error, the spec with the shortest step and, among
 * steps within 5 % of the shortest, the one with the smallest error. Collective; all ranks choose alike.
 * Measures each spec on the mean of the given gradients, over the group's own links.
 *
 * Blocks for three reductions per spec and one more. Needs memory for one reducer and for copies of the
 * gradients: two on the device and two on the host.
 * Call it with the gradients of a step early in training, but not of the first step of a model whose last
 * layer is zero, because gradients below that layer are then zero.
 *
 * @param comm       the communicator. In a world of 1 the first spec is chosen, and the trials are zero.
 * @param tensors    (n_tensors), as for gw_reducer_create(), with gw_tensor::grad. Unchanged.
 * @param n_tensors  1 or more.
 * @param options    the specs, and what they are compared for.
 * @param stream     see the top; may differ.
 * @param trials     out: (n_specs), by spec. May be null.
 * @param chosen     out: the index of the chosen spec in gw_choose_options::specs.
 * @return #GW_BAD_ARGUMENT, also if the mean gradient is zero or not finite: call gw_choose() again in a
 * later step; #GW_COMM_FAILED; #GW_DEVICE_FAILED; #GW_UNSUPPORTED.
 */
GW_API gw_status gw_choose(gw_comm comm, const gw_tensor* tensors, int32_t n_tensors,
                           const gw_choose_options* options, void* stream, gw_trial* trials, int32_t* chosen);

/** Reduces all gradients in place to the mean (or sum) over ranks, the same bits on every rank. Collective.
 *
 * A bucket whose tensors are float32 and contiguous in memory, in the order of registration, is reduced
 * without a copy. The tensors of any other bucket are copied to memory that buckets share, as large as the
 * largest two, and back. There bfloat16 and float16 gradients become float32, and the result is rounded to
 * nearest; float16 beyond 65504 is infinity, as loss scaling expects. The wire carries what the spec says:
 * "bf16" for bfloat16 gradients is lossless, "fp32" sends twice the bytes.
 *
 * A gradient with non-finite values makes the result of its own tensor non-finite on every rank: these
 * elements with a wire format, the whole tensor with "powersgd". It reaches no other tensor and no residual;
 * docs/numerics.md describes the effect on rounding and the limits of float32.
 *
 * @param reducer  the reducer.
 * @param grads    (n_tensors) addresses, aligned to the element size, null only for an empty tensor. Null:
 *                 the addresses of the last call, or those in gw_tensor::grad. May differ, and may change
 *                 between steps; if the addresses of a bucket that is reduced in place change, the call
 *                 blocks until work in flight is done.
 * @param stream   see the top; may differ.
 * @param request  out: as gw_call_options::request. May be null.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_reducer_allreduce(gw_reducer reducer, void* const* grads, void* stream,
                                      gw_request* request);

/** A tensor's state in the caller's memory, on the communicator's device: FP32. */
typedef struct gw_state {
  /** (rows, cols): the residual of error feedback, at first zeros. Null: the residual begins as zeros, and
   * what it holds after the step is lost. */
  float* residual;
  /** PowerSGD's factor Q, (cols, rank), followed with alternate=on by P, (rows, rank); at first as
   * gw_orthonormalize() makes them of zeros. Not null if the tensor is compressed: gw_spec_info::rank. */
  float* factor;
} gw_state;

/** As gw_reducer_allreduce(), with the state of the step in the caller's memory, for frameworks whose steps
 * are functions without side effects. The reducer's own state is lost. Copies the state in and out; on a CUDA
 * device, blocks until `step` is known. Collective. In a world of 1, nothing is done.
 *
 * @param reducer  a reducer whose spec has neither "dion" nor ef=ef21 nor momentum=.
 * @param grads    (n_tensors), as in gw_reducer_allreduce().
 * @param states   (n_tensors): replaced by the state after the step. The addresses may differ.
 * @param step     the number of earlier steps, on the communicator's device; the same on every rank.
 * @param stream   see the top; may differ.
 * @return #GW_BAD_ARGUMENT, #GW_COMM_FAILED, #GW_DEVICE_FAILED, #GW_UNSUPPORTED.
 */
GW_API gw_status gw_reducer_apply(gw_reducer reducer, void* const* grads, const gw_state* states,
                                  const int32_t* step, void* stream);

/** Orthonormalizes the columns of factors of PowerSGD, in place. Replaces a zero or dependent column by a
 * random direction, the same on every rank. Communicates with no other rank. The first call with a list of
 * shapes allocates memory, which the communicator keeps; later ones wait for the previous one with that list.
 *
 * @param comm    determines the device.
 * @param values  the factors, each of which begins at the next multiple of 4 elements; aligned to 16 bytes.
 * @param shapes  (n, 3): rows, columns (at most 512, and at most the rows), and the matrix's number in random
 *                draws: its index in gw_reducer_create(). In host memory.
 * @param n       number of factors.
 * @param second  nonzero: the factors are Q, otherwise P. Part of random draws.
 * @param seed    the spec's seed. Part of random draws.
 * @param step    the number of earlier steps. Part of random draws.
 * @param flags   (n) on the communicator's device. Nonzero on entry: the factor remains unchanged. Becomes 1
 *                if a factor is not finite, which then remains unchanged.
 * @param stream  see the top.
 * @return #GW_BAD_ARGUMENT, #GW_DEVICE_FAILED.
 */
GW_API gw_status gw_orthonormalize(gw_comm comm, float* values, const int64_t* shapes, int32_t n,
                                   int32_t second, uint64_t seed, int64_t step, int32_t* flags, void* stream);

/** Marks a gradient as complete at this point of `stream`, so that its bucket is reduced while backward
 * continues, on CUDA and on the host. Never waits for the network. Call it for every tensor, in any order,
 * then gw_reducer_wait().
 *
 * Addresses are those in gw_tensor::grad, or of the last gw_reducer_allreduce(). On the host, do not write to
 * a gradient between this call and gw_reducer_wait().
 *
 * @param reducer  the reducer.
 * @param tensor   index of the tensor as registered. The order may differ.
 * @param stream   see the top; may differ.
 * @return #GW_BAD_ARGUMENT: no such tensor, ready twice in a step, or its address is unknown;
 *         #GW_COMM_FAILED; #GW_DEVICE_FAILED; #GW_UNSUPPORTED.
 */
GW_API gw_status gw_reducer_ready(gw_reducer reducer, int32_t tensor, void* stream);

/** Ends the step: later work on `stream` sees the reduced gradients (on the host: they are complete on
 * return). Collective.
 *
 * @param reducer  the reducer.
 * @param stream   see the top; may differ.
 * @param request  out: as gw_call_options::request. May be null.
 * @return #GW_BAD_ARGUMENT names the tensors that were not ready, without gw_reducer_options::skip_unused:
 *         mark them ready and call this again;
 *         #GW_COMM_FAILED; #GW_DEVICE_FAILED; #GW_UNSUPPORTED.
 */
GW_API gw_status gw_reducer_wait(gw_reducer reducer, void* stream, gw_request* request);

/** Elements [begin, end) of a tensor. */
typedef struct gw_range {
  /** Index of the tensor as registered. */
  int32_t tensor;
  /** First element. */
  int64_t begin;
  /** One past the last element. */
  int64_t end;
} gw_range;

/** Lists the elements whose mean (or sum) this rank finds in its gradients after a step: all of them or, with
 * gw_reducer_options::shard, its part of each bucket, in the order of the tensors. Every element belongs to a
 * rank. The other elements of a sharded reducer's gradients are unspecified after a step. The ranges never
 * change. With "powersgd" and "randk", whose sums all ranks need, the mean is everywhere.
 *
 * @param reducer   the reducer.
 * @param ranges    out: (capacity), the first ranges. May be null if capacity is 0.
 * @param capacity  elements of `ranges`.
 * @param count     out: the number of ranges.
 * @return #GW_BAD_ARGUMENT.
 */
GW_API gw_status gw_reducer_shards(gw_reducer reducer, gw_range* ranges, int32_t capacity, int32_t* count);

/** Times and bytes of this rank's last step. */
typedef struct gw_stats {
  /** sizeof(gw_stats), set by the caller. */
  size_t size;
  /** Steps completed so far, including those of a loaded state. */
  int64_t steps;
  /** Bytes sent in the last step, measured at the transport. */
  uint64_t wire_bytes;
  /** Bytes that the gradients would have sent without compression, with the requested schedule, or with the
   * schedule that auto chooses for "fp32". */
  uint64_t dense_bytes;
  /** Milliseconds in which any bucket was in flight: compression and communication. */
  double comm_ms;
  /** Milliseconds for which communication stalled the stream of the last wait. */
  double exposed_comm_ms;
  /** Bytes of device memory for residuals, other codec state, and staging. */
  int64_t extra_bytes;
  /** Number of buckets; 0 in a world of 1, where nothing is done. */
  int32_t buckets;
  /** Buckets that are reduced without a copy. */
  int32_t buckets_in_place;
  /** One line per bucket: its compression, its schedules, and the reasons for the schedules. Valid until the
   * reducer is destroyed. */
  const char* description;
} gw_stats;

/** Reports times and bytes of the last step.
 *
 * @param reducer  the reducer.
 * @param stats    out; its `size` is set.
 * @return #GW_BAD_ARGUMENT; #GW_DEVICE_FAILED until the last step has completed: synchronize its stream, or
 *         wait for its request, first.
 */
GW_API gw_status gw_reducer_stats(gw_reducer reducer, gw_stats* stats);

/** Saves a checkpoint of this rank's codec state (residuals, factors, ...) and step count to host memory.
 * Every rank saves its own. Loaded into a reducer that was created with the same spec, tensors (in any
 * order), options, rank and world size, it lets training resume bit for bit. docs/checkpoints.md describes
 * the layout.
 *
 * Blocks until work in flight is done. To learn the size first, pass a null `state`:
 *
 *     size_t bytes;
 *     gw_reducer_state_save(reducer, NULL, 0, &bytes);
 *     void* state = malloc(bytes);
 *     gw_reducer_state_save(reducer, state, bytes, &bytes);
 *
 * @param reducer   the reducer, between two steps.
 * @param state     out: (capacity) bytes. Null: nothing is saved; then it may be called during a step.
 * @param capacity  size of `state` in bytes; 0 if `state` is null.
 * @param bytes     out: the size of the saved state in bytes.
 * @return #GW_BAD_ARGUMENT, also if the state does not fit.
 */
GW_API gw_status gw_reducer_state_save(gw_reducer reducer, void* state, size_t capacity, size_t* bytes);

/** Loads a state that this rank saved in a world of this size. A survivor of gw_comm_shrink() or a rank of
 * gw_comm_grow() may also load the state that it saved in the previous world, under another rank number.
 *
 * Then the rank's whole residual is loaded, in units of its gradient, so that
 *
 *     sum over ranks of residual_new  +  world * mean  ==  sum over ranks of (gradient + residual_old)
 *
 * holds for the current ranks and the current world. Factors, the same on every rank, are kept. The residual
 * of a lost rank is lost, unless gw_reducer_state_load_ranks() loads it. In a world of 1, where nothing is
 * sent, the next step adds the residual to the gradients.
 *
 * The next step blocks the caller while ranks compare the loaded states. It fails with #GW_COMM_FAILED on
 * every rank unless all ranks have loaded a state of the same step and run, and no two ranks the residual of
 * the same rank.
 *
 * @param reducer  the reducer, between two steps.
 * @param state    (size) bytes in host memory.
 * @param size     the size of the state in bytes.
 * @return #GW_BAD_ARGUMENT if the state is damaged, or belongs to another spec or tensor, or to another rank
 *         of a world of this size: the text says which, and the reducer is unchanged.
 */
GW_API gw_status gw_reducer_state_load(gw_reducer reducer, const void* state, size_t size);

/** Loads the states of a run with any number of ranks: all of them in any order, or at least those of the
 * ranks r, r + world, r + 2 world, ... for the current rank r.
 *
 * The sum of their residuals becomes this rank's, so the sum over all ranks is kept. Additional ranks start
 * without residual. With as many ranks as states, each rank gets its own state back, bit for bit. Otherwise
 * as gw_reducer_state_load().
 *
 * @param reducer  the reducer, between two steps.
 * @param states   (n) addresses in host memory.
 * @param sizes    (n) sizes in bytes.
 * @param n        1 or more.
 * @return #GW_BAD_ARGUMENT: as gw_reducer_state_load(), or a state that this rank needs is missing.
 */
GW_API gw_status gw_reducer_state_load_ranks(gw_reducer reducer, const void* const* states,
                                             const size_t* sizes, int32_t n);

/** Frees the reducer. Blocks until work in flight is done.
 *
 * @param reducer  may be null, which does nothing.
 * @return #GW_BAD_ARGUMENT in a callback of gw_format.
 */
GW_API gw_status gw_reducer_destroy(gw_reducer reducer);

/** @} */

#ifdef __cplusplus
}
#endif

#endif /* GRADWIRE_H */
