// Test suites that run once per device of this machine: "host" and, with GPUs, "cuda0", "cuda1" ...
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "runtime/device/device.h"

namespace gradwire::testing {

inline std::string device_label(Device device) {
  return device.is_host() ? "host" : fmt::format("cuda{}", device.index);
}

}  // namespace gradwire::testing

#define GW_INSTANTIATE_ON_DEVICES(Suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(On, Suite, ::testing::ValuesIn(::gradwire::available_devices()), \
                           [](const ::testing::TestParamInfo<::gradwire::Device>& info) {   \
                             return ::gradwire::testing::device_label(info.param);          \
                           })
