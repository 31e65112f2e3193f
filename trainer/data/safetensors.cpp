#include "trainer/data/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "runtime/util/parse.h"
#include "trainer/data/dataset.h"

namespace gradwire {
namespace {

// The writer uses ordered JSON. The reader uses sorted JSON, because an ordered object searches linearly for
// each name.
using Json = nlohmann::ordered_json;
using SortedJson = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are written in memory order");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // limit of the format
constexpr const char* kWrittenOf = "{}: {} bytes written, the header declares {}";
const std::string kChecksumKey = "\"crc32\":\"";
const std::string kNoDigits = "00000000";

std::string hex8(uLong value) {
  return fmt::format("{:08x}", value);
}

}  // namespace

SafetensorsWriter::Written& SafetensorsWriter::Written::operator+=(const Written& other) {
  bytes += other.bytes;
  crc ^= other.crc;
  return *this;
}

SafetensorsWriter::SafetensorsWriter(std::string path, const std::map<std::string, std::string>& metadata,
                                     const std::vector<Entry>& entries)
    : path_(std::move(path)), file_(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (file_.fd() < 0) fail();
  Json about{{"crc32", kNoDigits}};
  for (const auto& [key, value] : metadata) about[key] = value;
  Json::object_t header;
  header.reserve(entries.size() + 1);
  header.push_back({"__metadata__", std::move(about)});
  std::unordered_set<std::string> names;
  uint64_t offset = 0;
  for (const Entry& entry : entries) {
    require<Error>(names.insert(entry.name).second, "{}: two tensors named '{}'", path_, entry.name);
    const auto bytes = static_cast<uint64_t>(element_count(entry.shape) * bytes_of(entry.dtype));
    header.push_back({entry.name, Json{{"dtype", name(entry.dtype)},
                                       {"shape", entry.shape},
                                       {"data_offsets", {offset, offset + bytes}}}});
    begins_[entry.name] = offset;
    offset += bytes;
  }
  std::string text = Json(std::move(header)).dump(-1, ' ', false, Json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');  // aligns the data
  const uint64_t length = text.size();
  const uint64_t data_at = sizeof length + length;
  for (auto& [name, begin] : begins_) begin += data_at;
  end_ = data_at + offset;
  put(&length, sizeof length);
  written_.crc = 0;  // the CRC does not cover the length
  crc_digits_at_ = sizeof length + text.find(kChecksumKey) + kChecksumKey.size();
  put(text.data(), text.size());
  if (ftruncate(file_.fd(), static_cast<off_t>(end_)) != 0) fail();
}

// Opens write-only. A network file system may then write back only the given bytes, not the whole page, which
// may contain another writer's bytes.
SafetensorsWriter::SafetensorsWriter(std::string path)
    : path_(std::move(path)), file_(open(path_.c_str(), O_WRONLY | O_CLOEXEC)) {
  if (file_.fd() < 0) fail();
  const SafetensorsReader header(path_);
  for (const SafetensorsReader::Tensor& tensor : header.tensors()) {
    begins_[tensor.name] = header.data_at() + tensor.begin;
  }
  at_ = header.data_at();
  end_ = header.file_bytes();
}

void SafetensorsWriter::seek(const std::string& tensor, uint64_t first) {
  const auto begin = begins_.find(tensor);
  require<Error>(begin != begins_.end(), "{}: has no tensor '{}'", path_, tensor);
  at_ = begin->second + first;
}

// Adds data to the CRC. The CRC of the whole data is the sum in GF(2) of the CRCs of the parts, each shifted
// by the number of bytes after the part.
void SafetensorsWriter::put(const void* data, size_t bytes) {
  require<Error>(at_ + bytes <= end_, kWrittenOf, path_, at_ + bytes, end_);
  const uint64_t after = end_ - at_ - bytes;
  const uLong crc = crc32_z(0, static_cast<const Bytef*>(data), bytes);
  written_ += {bytes, static_cast<uint32_t>(crc32_combine(crc, 0, static_cast<z_off_t>(after)))};
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = pwrite(file_.fd(), from, bytes, static_cast<off_t>(at_));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail();
    from += done, at_ += static_cast<uint64_t>(done), bytes -= static_cast<size_t>(done);
  }
}

void SafetensorsWriter::close() {
  if ((fsync(file_.fd()) != 0 && !is_unsupported(errno)) || !file_.close()) fail();
}

void SafetensorsWriter::finish(const Written& by_others) {
  Written all = written_;
  all += by_others;
  require<Error>(all.bytes == end_, kWrittenOf, path_, all.bytes, end_);
  const std::string digits = hex8(all.crc);
  if (pwrite(file_.fd(), digits.data(), digits.size(), static_cast<off_t>(crc_digits_at_)) !=
      static_cast<ssize_t>(digits.size())) {
    fail();
  }
  close();
}

void SafetensorsWriter::fail() const {
  throw Error("{}: writing failed: {}", path_, std::strerror(errno));
}

SafetensorsReader::SafetensorsReader(std::string path)
    : path_(std::move(path)), file_(open_regular_file(path_)) {
  struct stat status {};
  if (fstat(file_.fd(), &status) != 0) refuse("{}", std::strerror(errno));
  file_bytes_ = static_cast<uint64_t>(status.st_size);
  read_header();
}

void SafetensorsReader::read_header() {
  uint64_t length = 0;
  if (file_bytes_ < sizeof length) {
    refuse_kind(fmt::format("too short to be a safetensors file: {} bytes", file_bytes_));
  }
  read_at(0, &length, sizeof length);
  if (length > kMaxHeaderBytes || length > file_bytes_ - sizeof length) {
    refuse_kind(fmt::format("truncated, or not a safetensors file: a header of {} bytes in a file of {}",
                            length, file_bytes_));
  }
  header_.resize(length);
  read_at(sizeof length, header_.data(), length);
  data_at_ = sizeof length + length;

  SortedJson header;
  try {
    header = SortedJson::parse(header_);
  } catch (const SortedJson::parse_error& error) {
    refuse_kind(
        fmt::format("corrupt, or not a safetensors file: its header is not JSON at byte {}", error.byte));
  } catch (const SortedJson::out_of_range&) {
    refuse("corrupt: its header holds a number that is too large");
  }
  if (!header.is_object()) refuse("its header is not a JSON object");
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) refuse("__metadata__ is not an object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) refuse("metadata '{}' is not a string", key);
        metadata_[key] = text.get<std::string>();
      }
    } else {
      add_tensor(name, &value);
    }
  }
  index_tensors();
}

void SafetensorsReader::refuse_kind(const std::string& why) const {
  std::vector<uint8_t> head(std::min<uint64_t>(file_bytes_, kFileKindBytes));
  read_at(0, head.data(), head.size());
  const std::string kind = foreign_kind(head);
  if (kind.empty()) refuse("{}", why);
  refuse("not a safetensors file but {}{}", kind,
         kind.starts_with("a zip")
             ? ", or, if torch.save() wrote it, load it in Python and write its state_dict with "
               "safetensors.torch.save_file()"
             : "");
}

void SafetensorsReader::index_tensors() {
  std::sort(tensors_.begin(), tensors_.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);  // empty tensors first
  });
  uint64_t end = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[i];
    if (t.begin != end) refuse("corrupt: '{}' does not begin where the previous tensor ends", t.name);
    end += t.bytes;
    index_[t.name] = i;
  }
  const uint64_t data_bytes = file_bytes_ - data_at_;
  if (end != data_bytes) {
    refuse("{}: {} bytes of tensors, expected {}", end > data_bytes ? "truncated" : "too long", data_bytes,
           end);
  }
}

void SafetensorsReader::add_tensor(const std::string& name, const void* opaque) {
  const SortedJson& json = *static_cast<const SortedJson*>(opaque);
  auto wrong = [&](const char* what) { refuse("corrupt: '{}' has no valid {}", name, what); };
  if (!json.is_object()) wrong("description");
  auto field = [&](const char* key) -> const SortedJson& {
    const auto at = json.find(key);
    if (at == json.end()) wrong(key);
    return *at;
  };
  const SortedJson &dtype = field("dtype"), &shape = field("shape"), &offsets = field("data_offsets");
  if (!dtype.is_string()) wrong("dtype");
  if (!shape.is_array()) wrong("shape");
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    wrong("data_offsets");
  }
  Tensor tensor{.name = name, .dtype = dtype.get<std::string>(), .shape = {}};
  tensor.elements = 1;
  for (const SortedJson& extent : shape) {
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > uint64_t{1} << 60) wrong("shape");
    tensor.shape.push_back(extent.get<int64_t>());
    if (__builtin_mul_overflow(tensor.elements, tensor.shape.back(), &tensor.elements)) wrong("shape");
  }
  const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
  if (begin > end || end > file_bytes_) {
    refuse("truncated or corrupt: '{}' ends at byte {} of the data, the file has {} bytes", name, end,
           file_bytes_);
  }
  tensor.begin = begin;
  tensor.bytes = end - begin;
  // An unknown type is an error only when the tensor is read. For known types the size must match the shape.
  const std::optional<DType> known = find_dtype(tensor.dtype);
  if (known && (tensor.elements > int64_t{1} << 58 ||
                static_cast<uint64_t>(tensor.elements * bytes_of(*known)) != tensor.bytes)) {
    refuse("corrupt: the shape of '{}' does not match its {} bytes", name, tensor.bytes);
  }
  tensors_.push_back(std::move(tensor));
}

const SafetensorsReader::Tensor* SafetensorsReader::find(const std::string& name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &tensors_[at->second];
}

void SafetensorsReader::verify(bool required) const {
  const auto at = metadata_.find("crc32");
  const size_t digits_at = header_.find(kChecksumKey) + kChecksumKey.size();
  const bool there = at != metadata_.end() && at->second.size() == kNoDigits.size() &&
                     header_.find(kChecksumKey) != std::string::npos &&
                     header_.compare(digits_at, kNoDigits.size(), at->second) == 0;
  if (!there) {
    if (required) refuse("damaged, or not written by gradwire: it has no checksum");
    return;
  }
  std::string header = header_;
  header.replace(digits_at, kNoDigits.size(), kNoDigits);
  uLong crc = crc32_z(0, reinterpret_cast<const Bytef*>(header.data()), header.size());
  std::vector<Bytef> chunk(size_t{1} << 20);
  for (uint64_t from = data_at_; from < file_bytes_; from += chunk.size()) {
    const size_t bytes = std::min<uint64_t>(chunk.size(), file_bytes_ - from);
    read_at(from, chunk.data(), bytes);
    crc = crc32_z(crc, chunk.data(), bytes);
  }
  if (hex8(crc) != at->second) refuse("damaged: its checksum is {}, expected {}", hex8(crc), at->second);
}

void SafetensorsReader::read(const Tensor& tensor, int64_t first, std::span<float> out) const {
  if (tensor.dtype != "F32") {
    refuse("'{}' has type {}; only F32 is supported, convert it first", tensor.name, tensor.dtype);
  }
  read_bytes(tensor, static_cast<uint64_t>(first) * sizeof(float), std::as_writable_bytes(out));
}

void SafetensorsReader::read_bytes(const Tensor& tensor, uint64_t first, std::span<std::byte> out) const {
  require<Error>(first <= tensor.bytes && out.size() <= tensor.bytes - first,
                 "{}: reading past the end of '{}'", path_, tensor.name);
  read_at(data_at_ + tensor.begin + first, out.data(), out.size());
}

void SafetensorsReader::read_at(uint64_t at, void* out, size_t bytes) const {
  gradwire::read_at(file_.fd(), path_, at, {static_cast<std::byte*>(out), bytes});
}

}  // namespace gradwire
