/* Gradwire's C ABI: averaged gradients over many processes, through few bytes on the wire.
 *
 * In three calls: gw_comm_create() once per process, gw_reducer_create() once per model, and
 * gw_reducer_allreduce() in every step. docs/for-framework-authors.md walks through it.
 *
 * Status   Every function returns a gw_status (the three at the top and the destroy functions aside, see there).
 *          No exception leaves the library, and it never ends the process. After anything but GW_OK,
 *          gw_last_error() says what was wrong and what to do. Outputs are written on GW_OK only.
 * Handles  gw_comm and gw_reducer are names, not addresses: a null, made-up or destroyed handle is
 *          GW_BAD_HANDLE, never a crash. A handle belongs to the process that created it (not to its forks).
 * Threads  Any function may be called from any thread. Calls on one communicator and its reducers run one
 *          after the other; gw_comm_abort() alone does not wait its turn.
 * Order    Collective calls (marked so) are made by all ranks of a communicator, in the same order and with the
 *          same arguments; "may differ" marks those that need not be the same. Ranks that disagree get GW_COMM_FAILED
 *          with a text that names both calls. Two calls that are alike in all arguments but the address can only be
 *          told apart by a tag: see gw_call_tag().
 * Failure  A passed deadline, a dead peer, a disagreement or gw_comm_abort() is final for the communicator:
 *          every pending and later call of every rank that can be reached fails. Destroy it and create another.
 * Streams  `stream` is a cudaStream_t cast to void* (null: the legacy default stream) when the communicator is on
 *          a CUDA device: calls enqueue and return, and results are there for later work on that stream. On the
 *          host it must be null, and a call returns when its result is there.
 * Memory   Gradient memory belongs to the caller and is on the communicator's device. It must stay valid until
 *          the stream has passed the call that used it.
 * Structs  Set `size` to sizeof the struct and everything else to zero before filling it in; zero means the
 *          default. So structs can grow without breaking programs compiled earlier.
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

/* Numbers of a fixed size rather than enum types, so that a wrong one can be told to be wrong. */
typedef int32_t gw_status;
enum {
  GW_OK = 0,
  GW_BAD_ARGUMENT = 1,  /* null, out of range, or a text that does not parse */
  GW_BAD_HANDLE = 2,    /* null, not a handle, of another kind, destroyed, or of another process */
  GW_COMM_FAILED = 3,   /* deadline, dead peer, disagreement, abort: final for the communicator */
  GW_DEVICE_FAILED = 4, /* a CUDA call failed, or the device does not exist */
  GW_UNSUPPORTED = 5,   /* legal, but not in this version or build */
  GW_NO_MEMORY = 6,     /* host or device */
  GW_INTERNAL = 7       /* a defect of the library */
};

typedef int32_t gw_dtype;
enum { GW_FLOAT32 = 0, GW_BFLOAT16 = 1 };

typedef int32_t gw_op;
enum { GW_SUM = 0, GW_AVG = 1 };

#define GW_HOST (-1) /* as a device: ordinary memory and threads */

typedef struct gw_comm_handle* gw_comm;
typedef struct gw_reducer_handle* gw_reducer;

/* ---- Version and errors: no status, cannot fail ---------------------------------------------------------- */

/* Of the library that was loaded: major * 10000 + minor * 100 + patch. Compare with GW_VERSION_*. */
GW_API int gw_version(void);

/* A constant such as "GW_BAD_HANDLE"; never null, whatever the number. */
GW_API const char* gw_status_string(gw_status status);

/* What this thread's last failed call had to say; "" when none has failed. Valid until the thread's next call that
 * fails. Never null. */
GW_API const char* gw_last_error(void);

/* ---- Communicators --------------------------------------------------------------------------------------- */

/* Joins a group of `world` ranks. Collective: blocks until all have joined.
 *
 * rendezvous  how the ranks find each other, the same text on all of them:
 *               "tcp://HOST:PORT"  processes on any machines; rank 0 listens at PORT of HOST
 *               "file:///PATH"     processes that share a folder, in which rank 0 makes and removes PATH
 *               "nccl://"          processes with a GPU each that meet at NCCL_COMM_ID=HOST:PORT of the
 *                                  environment, as programs that use NCCL do
 *               "local://NAME"     threads of one process, each of them one rank
 *             Processes on GPUs talk through NCCL, which is loaded then; processes on the host through TCP.
 *             may be null when world is 1. A name, port or path can be used again once the group stands.
 * rank        0 .. world - 1, each of them once.
 * device      GW_HOST, or the number of a CUDA device of this process.
 * timeout_ms  > 0. The longest wait for a peer: while joining, and later in any operation. A training step in
 *             which one rank writes a checkpoint counts as a wait for all others. May differ: each rank waits as long
 *             as it was told.
 * comm        out; to be given to gw_comm_destroy().
 *
 * GW_BAD_ARGUMENT, GW_COMM_FAILED (somebody did not come; the text says who), GW_DEVICE_FAILED, GW_UNSUPPORTED. */
GW_API gw_status gw_comm_create(const char* rendezvous, int rank, int world, int device, int64_t timeout_ms,
                                gw_comm* comm);

/* Works on an NCCL communicator that exists already; it stays the caller's, and must outlive *comm. Collective.
 *
 * nccl_comm   an ncclComm_t cast to void*.
 * device      the CUDA device it was created on.
 *
 * The communicator is never aborted here: past timeout_ms calls fail, but what is enqueued on the GPU goes on
 * waiting until its owner aborts it. No other thread may use it during a call, nor between calls on another
 * stream in an order that differs between ranks.
 *
 * GW_BAD_ARGUMENT, GW_DEVICE_FAILED, GW_UNSUPPORTED where NCCL is missing. */
GW_API gw_status gw_comm_from_nccl(void* nccl_comm, int device, int64_t timeout_ms, gw_comm* comm);

/* Says how ranks sit in nodes: rank = node * ranks_per_node + local index, as launchers number them. Needed by
 * schedule=hierarchical, and considered by schedule=auto. Before the first reducer and gw_allreduce(); the same on
 * every rank. 0: unknown, the default.
 *
 * GW_BAD_ARGUMENT unless it divides the world. */
GW_API gw_status gw_comm_set_ranks_per_node(gw_comm comm, int ranks_per_node);

/* GW_COMM_FAILED, with the reason, once the communicator has failed; else GW_OK. A CUDA stream carries no
 * errors: when an operation on it is given up, the stream goes on, with garbage in the buffers. So
 * synchronize, check, and only then trust. On the host, calls fail by themselves. */
GW_API gw_status gw_comm_check(gw_comm comm);

/* Fails everything that is pending on the communicator, here and, as far as they can be reached, on its other
 * ranks, with `reason` (may be null) in their texts. For watchdogs: returns at once, from any thread. */
GW_API gw_status gw_comm_abort(gw_comm comm, const char* reason);

/* Gives the handle back. The group lives on until its last reducer is destroyed, too. Waits for work in flight;
 * abort first so as not to. Null is legal and does nothing. */
GW_API gw_status gw_comm_destroy(gw_comm comm);

/* ---- Tags -------------------------------------------------------------------------------------------------- */

/* Says what this thread's next gw_allreduce() or gw_reducer_create() on `comm` is about: the name of a tensor, say.
 * Ranks compare it as they compare the call's other arguments, and error texts quote it. So two calls of equal size that
 * two ranks make in different orders are an error on every rank. Without tags they cannot be told apart, and each rank
 * gets sums of unlike things: where a scheduler, a compiler or several threads may choose the order of calls, tag
 * them all.
 *
 * tag     at most 1000 bytes of UTF-8 without control characters; copied. Null or "": none. A reducer's tag is part of
 *         all its calls. The next call uses the tag up, whether it succeeds or not.
 *
 * Between GPUs (NCCL) ranks compare a call when it is first made; of calls that all ranks have made before, another
 * order is not noticed.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE. */
GW_API gw_status gw_call_tag(gw_comm comm, const char* tag);

/* ---- Stateless allreduce --------------------------------------------------------------------------------- */

/* Sums, or averages, buf over all ranks, in place; every rank ends with the same bits. Collective.
 *
 * buf     (count) elements of dtype on the communicator's device, aligned to the element. May be null when count
 *         is 0. The address may differ.
 * dtype   GW_FLOAT32, or GW_BFLOAT16: converted to float32 and back around the reduction.
 * spec    "fp32", "bf16[:round=nearest|stochastic]" or "fp8[:round=...]", each with
 *         ",schedule=auto|ring|tree|two_shot|hierarchical" and ",intra_node=wire|fp32": the format on the wire. Nothing is remembered between
 *         calls, so there is no error feedback: what is rounded away is gone. "powersgd" needs a reducer.
 * stream  see the top; may differ.
 *
 * The program for a buffer and tag is built at its first use and kept (the 64 used last): reuse both. Changing how often
 * a buffer is used costs nothing; a new one blocks the caller until work in flight is done.
 * In a world of 1, buf stays as it is.
 *
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED, GW_NO_MEMORY. */
GW_API gw_status gw_allreduce(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, gw_op op,
                              const char* spec, void* stream);

/* ---- Reducers: a model's gradients, compressed with error feedback ---------------------------------------- */

/* One gradient tensor. All elements of an array of these have the same `size`. */
typedef struct gw_tensor {
  size_t size;      /* sizeof(gw_tensor) */
  const char* name; /* unique in the reducer; for error texts and state; copied; null: "tensor 7" */
  int64_t rows;     /* PowerSGD sees a (rows, cols) matrix, row-major; a vector has cols == 1. */
  int64_t cols;     /* For more dimensions: rows = the first, cols = the product of the rest. 0 is legal. */
  gw_dtype dtype;   /* GW_FLOAT32 */
  void* grad; /* (rows, cols) where the gradient is, for gw_reducer_ready(); may be null if that isn't used */
} gw_tensor;

typedef struct gw_reducer_options {
  size_t size;          /* sizeof(gw_reducer_options) */
  int64_t bucket_bytes; /* tensors are reduced together in buckets of about this size; default 25 MiB */
  int32_t sum;          /* nonzero: the sum comes back; default: the mean */
  int32_t no_timing;    /* nonzero: gw_stats has no times; default: recorded; may differ */
  uint64_t seed;        /* of stochastic rounding; ranks draw differently from the same seed */
} gw_reducer_options;

/* Registers a model's gradients. Collective.
 *
 * spec       "fp32" | "bf16[:round=nearest|stochastic]" | "fp8[:round=nearest|stochastic]" |
 *            "powersgd:rank=R[,wire=fp32|bf16|fp8][,start=N][,warm=on|off][,min_ratio=X][,seed=S]",
 *            each with ",ef=on|off", ",schedule=auto|ring|tree|two_shot|hierarchical" and
 *            ",intra_node=wire|fp32"; docs/formats.md says what they mean. The first schedule=auto of a communicator
 *            between processes measures its links, a tenth of a second at 1 Gb/s.
 * tensors    (n_tensors), in the order in which backward completes them: buckets are reduced in this order. Names,
 *            shapes and order are compared here; `grad` may differ.
 * options    may be null: defaults.
 * reducer    out; to be given to gw_reducer_destroy().
 *
 * Allocates residuals (as large as the gradients) and factors on the communicator's device, now and not in the step.
 * GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED, GW_NO_MEMORY. */
GW_API gw_status gw_reducer_create(gw_comm comm, const char* spec, const gw_tensor* tensors,
                                   int32_t n_tensors, const gw_reducer_options* options, gw_reducer* reducer);

/* Reduces all gradients, in place: what comes back is the mean (or sum) over ranks, the same bits on every rank.
 * Collective.
 *
 * grads   (n_tensors) addresses, 4-byte aligned, null only for an empty tensor; or null for where they were in the
 *         last call, or in gw_tensor.grad.
 *         A bucket whose tensors lie one directly behind the other in memory, in the order of registration, is
 *         reduced where it is, without a copy; the tensors of any other bucket are copied in and out.
 *         Addresses may change between steps; a change of an uncopied bucket blocks until work in flight is done.
 *         They may differ between ranks.
 *
 * A gradient that is not finite shows in the result of its own tensor, on every rank; it reaches no other tensor and no
 * residual. GW_BAD_ARGUMENT, GW_BAD_HANDLE, GW_COMM_FAILED, GW_DEVICE_FAILED. */
GW_API gw_status gw_reducer_allreduce(gw_reducer reducer, void* const* grads, void* stream);

/* The same overlapped with backward, on CUDA and on the host alike: gw_reducer_ready() for every tensor, in any
 * order, which may differ, when its gradient is complete at this point of `stream`; then gw_reducer_wait(). The last tensor of a bucket
 * starts its reduction, behind those of the buckets before it; the call never waits for it.
 * The gradients are where gw_tensor.grad, or the last gw_reducer_allreduce(), said. On the host, write nothing to a
 * gradient between its ready() and wait().
 * GW_BAD_ARGUMENT: no such tensor, ready twice in a step, or its address is unknown. */
GW_API gw_status gw_reducer_ready(gw_reducer reducer, int32_t tensor, void* stream);

/* Ends the step: later work on `stream` sees the reduced gradients (on the host: they are there on return).
 * Collective. GW_BAD_ARGUMENT names the tensors that were not ready; they can be made ready and wait() called
 * again. */
GW_API gw_status gw_reducer_wait(gw_reducer reducer, void* stream);

/* Times and bytes of the last step, of this rank. */
typedef struct gw_stats {
  size_t size;              /* sizeof(gw_stats), set by the caller */
  int64_t steps;            /* done so far, those before a loaded state included */
  uint64_t wire_bytes;      /* sent in the last step, measured at the transport */
  uint64_t dense_bytes;     /* what "fp32" would have sent, with the schedule asked for, or the one
                                that auto takes for "fp32" */
  double comm_ms;           /* while any bucket was under way: compression and communication */
  double exposed_comm_ms;   /* how long the stream of the last wait stood still for it */
  int64_t extra_bytes;      /* device memory held for residuals, what else codecs keep, and staging */
  int32_t buckets;          /* 0 in a world of 1, where nothing is done */
  int32_t buckets_in_place; /* reduced without a copy */
  const char* description;  /* a line per bucket: how it is compressed, which schedules and why; valid
                                until the reducer is destroyed */
} gw_stats;

/* On CUDA: GW_DEVICE_FAILED while the last step is not done; synchronize its stream first. */
GW_API gw_status gw_reducer_stats(gw_reducer reducer, gw_stats* stats);

/* A checkpoint of what this rank's codecs keep (residuals, factors, ...), and of the step count. With it loaded
 * into a reducer made with the same spec, tensors (in any order), options and rank of the same world, training goes
 * on bit for bit. Between steps only; waits for work in flight. Every rank saves and loads its own.
 * docs/state-format.md has the layout.
 *
 * size: out, in bytes. */
GW_API gw_status gw_reducer_state_size(gw_reducer reducer, size_t* size);
/* Writes gw_reducer_state_size() bytes to host memory; `size` says how much room there is. */
GW_API gw_status gw_reducer_state_save(gw_reducer reducer, void* state, size_t size);
/* `state` is in host memory. The next step fails with GW_COMM_FAILED on every rank unless all have loaded a state of the
 * same step and run. GW_BAD_ARGUMENT for a state that is damaged, or of another spec, tensor, world or rank:
 * the text says which; the reducer is unchanged then. */
GW_API gw_status gw_reducer_state_load(gw_reducer reducer, const void* state, size_t size);

/* Waits for work in flight, then frees. Null is legal and does nothing. */
GW_API gw_status gw_reducer_destroy(gw_reducer reducer);

#ifdef __cplusplus
}
#endif

#endif /* GRADWIRE_H */
