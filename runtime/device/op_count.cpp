#include "runtime/device/op_count.h"

namespace gradwire {
namespace {

thread_local OpCount* current = nullptr;

}  // namespace

OpCount::OpCount() : outer_(current) {
  current = this;
}
OpCount::~OpCount() {
  current = outer_;
}

void OpCount::op(const char* name) {
  for (OpCount* count = current; count != nullptr; count = count->outer_) ++count->ops_[name];
}
void OpCount::launch(const char* name) {
  for (OpCount* count = current; count != nullptr; count = count->outer_) ++count->launches_[name];
}

int64_t OpCount::total(const ByName& counts) {
  int64_t sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

}  // namespace gradwire
