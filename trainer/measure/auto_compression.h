// --compression auto: the request for a compression that is chosen from measurements before the first step.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "trainer/measure/recommend.h"

namespace gradwire {

struct AutoCompression {
  double error = 0.1;              // the largest error of one encode of the gradients (encode_error.h)
  bool replan = true;              // whether the run may choose again
  std::string plan;                // file of the choice: read if it exists, otherwise written; or empty
  std::vector<std::string> allow;  // candidates besides FP32; empty: candidate_specs()

  // Returns whether a value of --compression is a request, not a spec.
  static bool is_request(std::string_view text);
  // Parses grammar(). allow= is last, because specs contain commas. Throws BadInput.
  static AutoCompression parse(std::string_view text);
  std::string to_string() const;
  // Returns the choices: FP32 first. `bucket_mb`: the given bucket sizes; empty: all candidates.
  Choices choices(std::vector<int64_t> bucket_mb) const;
  std::vector<CompressionSpec> candidates() const;  // the specs of choices()
  // Returns the candidate of which `spec` is a choice: the same spec, or with more dense tensors; "" if none.
  std::string candidate_of(const std::string& spec) const;
  static std::string grammar() { return "auto[:error=E][,replan=off][,plan=FILE][,allow=SPEC+SPEC...]"; }

 private:
  void set_option(std::string_view text, std::string_view option);
};

}  // namespace gradwire
