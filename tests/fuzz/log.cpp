#include <sstream>
#include <string>

#include "tests/fuzz/files.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"

namespace gradwire::fuzz {

void log(Input input) {
  read_earlier_run(write_file("run.jsonl", input));
  const std::string line(reinterpret_cast<const char*>(input.data()), input.size());
  is_run_record(line);
  is_before(line, 5, true);
  may_refuse([&] {
    LiveRun run;
    std::istringstream lines(line);
    for (std::string one; std::getline(lines, one);) run.read(one);
    run.text();
    run.metrics();
  });
}

std::vector<Bytes> log_seeds() {
  return {
      bytes_of_text(R"({"type":"run","model":"vit_tiny","schedule":"ring","parameters":12,"device":"host"}
{"type":"step","step":4,"loss":2.5}
{"type":"eval","step":5,"epoch":1,"test_loss":0.5,"test_accuracy":0.25}
{"type":"summary","steps":5,"seconds":1.5,"final_loss":0.5,"test_loss":null,"test_accuracy":0.25,"ratio":2.0}
)"),
      bytes_of_text(R"({"type":"checkpoint","step":5,"bytes":7})"),
      bytes_of_text(
          R"({"type":"run","model":{"name":"tiny"},"ranks":2,"ranks_are":"threads","device":"host","compression":"int8","schedule":"ring","steps":9}
{"type":"waits","step":1,"seconds":1.0,"waited_s":[[0,0.5],[0,0]]}
{"type":"step","step":2,"loss":0.5,"step_ms":40,"images_per_s":240,"wire_bytes":1e6,"dense_bytes":4e6}
{"type":"waits","step":3,"seconds":2.0,"waited_s":[[0,1.5],[0.1,0]]}
{"type":"waits","step":5,"seconds":3.0,"waited_s":[[0,2.5],[0.1,0]]}
)")};
}

}  // namespace gradwire::fuzz
