#include "collectives/communicator/local_ranks.h"

#include <fmt/format.h>

#include <exception>
#include <mutex>

#include "runtime/threads/resources.h"
#include "runtime/threads/thread.h"

namespace gradwire {

void run_local_ranks(const std::vector<std::unique_ptr<Communicator>>& group,
                     const std::function<void(Communicator&)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  const auto failed = [&](Communicator& comm, const std::exception& error) {
    {
      std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    comm.abort(text_of(error));
  };
  std::vector<Thread> threads;
  threads.reserve(group.size());
  for (const auto& comm : group) {
    try {
      threads.emplace_back(fmt::format("the thread of rank {}", comm->rank()), [&, mine = comm.get()] {
        try {
          body(*mine);
        } catch (const std::exception& error) {
          failed(*mine, error);
        }
      });
    } catch (const std::exception& error) {  // running ranks must not wait for this rank
      failed(*comm, error);
      break;
    }
  }
  threads.clear();  // joins the threads
  if (first) std::rethrow_exception(first);
}

}  // namespace gradwire
