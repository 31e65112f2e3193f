#include "kernels/gemm/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"

namespace gradwire {
namespace {

class Tuning : public ::testing::Test {
 protected:
  void write(const std::string& text) { std::ofstream(path_) << text; }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(path_).rdbuf();
    return all.str();
  }
  // Returns the messages printed by a run that opens the file.
  std::string messages() {
    ::testing::internal::CaptureStderr();
    TuningFile file(path_);
    return ::testing::internal::GetCapturedStderr();
  }

  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/tuning";
  const TuningFile::Key key_{"NVIDIA H100 80GB HBM3", "cublasLt 130100", "NT 1600 4096 1024"};
};

TEST_F(Tuning, FindsTheChoiceOfAnEarlierRunOnTheSameDeviceAndVersion) {
  EXPECT_EQ(messages(), "");  // the file does not exist yet
  TuningFile(path_).add(key_, "0a1b");
  const TuningFile next(path_);
  EXPECT_EQ(next.find(key_), "0a1b");
  EXPECT_EQ(next.find({"NVIDIA H200", key_.maker, key_.kind}), std::nullopt);
  EXPECT_EQ(next.find({key_.device, "cublasLt 130200", key_.kind}), std::nullopt);
  EXPECT_EQ(next.find({key_.device, key_.maker, "NN 1600 4096 1024"}), std::nullopt);
  EXPECT_EQ(text(), "gradwire tuning 1\nNVIDIA H100 80GB HBM3\tcublasLt 130100\tNT 1600 4096 1024\t0a1b\n");
}

TEST_F(Tuning, LaterChoicesWin) {
  TuningFile(path_).add(key_, "1");
  TuningFile(path_).add(key_, "2");
  EXPECT_EQ(TuningFile(path_).find(key_), "2");
}

TEST_F(Tuning, NamesDamagedLinesAndUsesTheOthers) {
  TuningFile(path_).add(key_, "1");
  write(text() + "half a line\n\na\tb\t\td\n");
  TuningFile(path_).add({"other", "maker", "kind"}, "2");
  const std::string said = messages();
  testing::expect_has(said, {"line 3", "line 4", "line 5"});
  EXPECT_EQ(said.find("line 6"), std::string::npos) << said;
  ::testing::internal::CaptureStderr();
  const TuningFile file(path_);
  ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(file.find(key_), "1");
  EXPECT_EQ(file.find({"other", "maker", "kind"}), "2");
}

TEST_F(Tuning, NamesOnlyTheFirstFewDamagedLines) {
  std::string spoiled = "gradwire tuning 1\n";
  for (int i = 0; i < 1000; ++i) spoiled += "half a line\n";
  write(spoiled);
  const std::string said = messages();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 6) << said;
  testing::expect_has(said, {"995 more lines are ignored"});
}

// Imitates a process or an editor that dies while writing a line.
TEST_F(Tuning, FindsAChoiceAddedAfterATruncatedLine) {
  for (const char* unfinished : {"gradwire tuning 1", "gradwire tuning 1\ndevice\tmaker\tkind\tcho"}) {
    write(unfinished);
    TuningFile(path_).add(key_, "1");
    EXPECT_EQ(messages(), "");
    EXPECT_EQ(TuningFile(path_).find(key_), "1") << text();
  }
}

TEST_F(Tuning, DoesNotChangeAForeignFile) {
  write("my thesis\n");
  testing::expect_has(messages(), {"neither read nor written"});
  ::testing::internal::CaptureStderr();
  TuningFile file(path_);
  file.add(key_, "1");
  ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(file.find(key_), "1");  // this process finds its choice
  EXPECT_EQ(text(), "my thesis\n");
}

TEST_F(Tuning, WarnsOnceOfAFileThatCannotBeWritten) {
  ::testing::internal::CaptureStderr();
  TuningFile file(folder_.path() + "/no folder/tuning");
  file.add(key_, "1");
  file.add(key_, "2");
  const std::string said = ::testing::internal::GetCapturedStderr();
  testing::expect_has(said, {"cannot add a choice: No such file"});
  EXPECT_EQ(said.find("cannot add"), said.rfind("cannot add")) << said;
  EXPECT_EQ(file.find(key_), "2");
}

TEST_F(Tuning, EscapesTabsInNames) {
  const TuningFile::Key odd{"a\tb", "c\nd", ""};
  TuningFile(path_).add(odd, "1");
  EXPECT_EQ(messages(), "");
  EXPECT_EQ(TuningFile(path_).find(odd), "1");
}

TEST_F(Tuning, AcceptsConcurrentWriters) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      TuningFile file(path_);  // each process has its own TuningFile
      for (int i = 0; i < 20; ++i)
        file.add({"device", std::to_string(t), std::to_string(i)}, std::string(100, 'x'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(messages(), "");
  const TuningFile file(path_);
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 20; ++i)
      EXPECT_TRUE(file.find({"device", std::to_string(t), std::to_string(i)}).has_value());
  }
}

TEST(TuningHex, RoundTripsBytesAndRejectsEverythingElse) {
  const unsigned char bytes[4] = {0, 0x7f, 0x80, 0xff};
  EXPECT_EQ(hex_bytes(bytes, 4), "007f80ff");
  unsigned char back[4] = {};
  ASSERT_TRUE(from_hex_bytes("007f80ff", back, 4));
  EXPECT_EQ(std::memcmp(back, bytes, 4), 0);
  for (const char* wrong : {"", "007f80f", "007f80ff0", "007f80fg", "007F80FF", "-07f80ff"})
    EXPECT_FALSE(from_hex_bytes(wrong, back, 4)) << wrong;
}

}  // namespace
}  // namespace gradwire
