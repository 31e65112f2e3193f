#include <string>

#include "tests/fuzz/files.h"
#include "trainer/log/earlier_run.h"
#include "trainer/log/records.h"

namespace gradwire::fuzz {

void log(Input input) {
  read_earlier_run(write_file("run.jsonl", input));
  const std::string line(reinterpret_cast<const char*>(input.data()), input.size());
  is_run_record(line);
  is_before(line, 5, 10);
}

std::vector<Bytes> log_seeds() {
  return {bytes_of_text(R"({"type":"run","model":"vit_tiny","schedule":"ring","parameters":12,"device":"host"}
{"type":"step","step":4,"loss":2.5}
{"type":"eval","step":5,"epoch":1,"test_loss":0.5,"test_accuracy":0.25}
{"type":"summary","steps":5,"seconds":1.5,"final_loss":0.5,"test_loss":null,"test_accuracy":0.25,"ratio":2.0}
)"),
          bytes_of_text(R"({"type":"checkpoint","step":5,"bytes":7})")};
}

}  // namespace gradwire::fuzz
