// Runs the parts of a test in threads.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace gradwire::testing {

// Runs body(0) ... body(count - 1), each in its own thread, and waits for all threads. Returns the text of
// each thread's exception, or "" if the thread threw none.
inline std::vector<std::string> errors_in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (const std::exception& error) {
        const std::string text = error.what();
        errors[i] = text.empty() ? "an error without a text" : text;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Runs body(0) ... body(count - 1), each in its own thread. An exception ends the program.
inline void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<std::string> no_errors(int count) {
  return std::vector<std::string>(static_cast<size_t>(count));
}

}  // namespace gradwire::testing
