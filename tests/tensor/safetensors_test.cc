#include "penstock/tensor/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "penstock/tensor/safetensors/header.h"

namespace penstock::internal::testing {
namespace {

namespace fs = std::filesystem;

constexpr at::ScalarType kEveryDtype[] = {at::kBool,
                                          at::kFloat4_e2m1fn_x2,
                                          at::kByte,
                                          at::kChar,
                                          at::kFloat8_e5m2,
                                          at::kFloat8_e4m3fn,
                                          at::kFloat8_e8m0fnu,
                                          at::kFloat8_e4m3fnuz,
                                          at::kFloat8_e5m2fnuz,
                                          at::kShort,
                                          at::kUInt16,
                                          at::kHalf,
                                          at::kBFloat16,
                                          at::kInt,
                                          at::kUInt32,
                                          at::kFloat,
                                          at::kComplexFloat,
                                          at::kDouble,
                                          at::kLong,
                                          at::kUInt64};

template <class Act>
void expect_error(const Act& act, const std::string& words) {
  try {
    act();
    ADD_FAILURE() << "no error, instead of: " << words;
  } catch (const SafetensorsError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos)
        << "message: " << error.what() << "\nwanted:  " << words;
  }
}

// Returns the bytes of a contiguous tensor.
std::string bytes_of(const at::Tensor& tensor) {
  EXPECT_TRUE(tensor.is_contiguous());
  return tensor.numel() == 0 ? "" : std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
}

at::Tensor from_bytes(const std::string& bytes, at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor tensor = at::empty(shape, dtype);
  EXPECT_EQ(tensor.nbytes(), bytes.size());
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string random_bytes(std::mt19937& random, std::size_t size, at::ScalarType dtype) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() & (dtype == at::kBool ? 1U : 255U));
  return bytes;
}

at::Tensor random_tensor(std::mt19937& random, at::IntArrayRef shape, at::ScalarType dtype) {
  return from_bytes(random_bytes(random, at::empty(shape, dtype).nbytes(), dtype), shape, dtype);
}

// Returns the same values with other strides: the first dimension innermost, and every second element unused.
at::Tensor with_odd_strides(const at::Tensor& tensor) {
  std::vector<std::int64_t> strides;
  std::int64_t stride = 2;
  for (const std::int64_t size : tensor.sizes()) {
    strides.push_back(stride);
    stride *= std::max<std::int64_t>(size, 1);
  }
  const at::Tensor odd = at::empty_strided(tensor.sizes(), strides, tensor.options());
  const auto element = static_cast<std::int64_t>(tensor.element_size());
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::int64_t place = 0;
    std::int64_t rest = i;
    for (std::int64_t d = tensor.dim() - 1; d >= 0; --d) {
      place += rest % tensor.size(d) * odd.stride(d);
      rest /= tensor.size(d);
    }
    std::memcpy(static_cast<char*>(odd.mutable_data_ptr()) + place * element,
                static_cast<const char*>(tensor.const_data_ptr()) + i * element, tensor.element_size());
  }
  return odd;
}

std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Returns a file with this header and data, which need not match.
std::string file_of(const std::string& header, const std::string& data = "") {
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}

// A test with its own directory, in which no temporary file may be left.
class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "penstock-safetensors-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      EXPECT_NE(entry.path().extension(), ".part") << entry.path();
    }
    fs::remove_all(folder_);
  }

  std::string path(const std::string& name = "model.safetensors") const { return folder_ / name; }

  fs::path folder_;
};

class SafetensorsOfEveryDtype : public Safetensors, public ::testing::WithParamInterface<at::ScalarType> {};

TEST_P(SafetensorsOfEveryDtype, ComeBackAsTheyWere) {
  const at::ScalarType dtype = GetParam();
  std::mt19937 random(1);
  NamedTensors tensors;
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{}, {0}, {1}, {5}, {2, 3}, {2, 0, 3}, {3, 1, 4, 2}}) {
    if (shape.empty() && dtype == at::kFloat4_e2m1fn_x2) continue;
    tensors.emplace_back(std::to_string(tensors.size()), random_tensor(random, shape, dtype));
  }
  NamedTensors written = tensors;
  for (const auto& [name, tensor] : tensors) written.emplace_back(name + " odd", with_odd_strides(tensor));
  write_safetensors(path(), written);

  const SafetensorsFile file(path());
  EXPECT_EQ(file.names().size(), written.size());
  for (const auto& [name, tensor] : tensors) {
    for (const std::string& one : {name, name + " odd"}) {
      SCOPED_TRACE(one);
      const at::Tensor read = file.tensor(one);
      EXPECT_EQ(read.scalar_type(), dtype);
      EXPECT_EQ(read.sizes(), tensor.sizes());
      EXPECT_EQ(bytes_of(read), bytes_of(tensor));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtype, SafetensorsOfEveryDtype, ::testing::ValuesIn(kEveryDtype),
                         [](const auto& dtype) { return std::string(c10::toString(dtype.param)); });

TEST_F(Safetensors, TakeViewsOfEveryKind) {
  const at::Tensor x = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor z = at::randn({3, 2}, at::kComplexFloat);
  const NamedTensors views = {{"transposed", x.t()},
                              {"narrowed", x.narrow(1, 2, 3)},
                              {"stepped", x.slice(0, 1, 4, 2)},
                              {"expanded", x.select(0, 1).expand({5, 6})},
                              {"offset", x.select(0, 3)},
                              {"conjugated", z.conj()},
                              {"negated", at::imag(z.conj())},
                              {"with gradient", at::ones({2}).requires_grad_()}};
  write_safetensors(path(), views);
  const SafetensorsFile file(path());
  for (const auto& [name, view] : views) {
    EXPECT_TRUE(file.tensor(name).equal(view.detach())) << name << "\n" << file.tensor(name) << "\n" << view;
    EXPECT_FALSE(file.tensor(name).requires_grad()) << name;
  }
}

TEST_F(Safetensors, KeepNamesAndMetadataOfOddCharacters) {
  const std::vector<std::string> odd = {"",
                                        "a.b/c d",
                                        "\"quoted\"",
                                        "back\\slash",
                                        "two\nlines",
                                        "{}[]:",
                                        "äß€漢😀",
                                        "\x01\x7f",
                                        std::string("\0x", 2),
                                        "__metadata",
                                        "dtype",
                                        "'",
                                        std::string(3000, 'x')};
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;
  for (const std::string& name : odd) {
    tensors.emplace_back(name, at::full({2}, static_cast<double>(tensors.size())));
    metadata[name + "key"] = name;
  }
  metadata["__metadata__"] = "";
  write_safetensors(path(), tensors, metadata);
  const SafetensorsFile file(path());
  EXPECT_EQ(std::set(file.names().begin(), file.names().end()), std::set(odd.begin(), odd.end()));
  EXPECT_EQ(file.metadata(), metadata);
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(file.tensor(name).equal(tensor)) << name;
}

TEST_F(Safetensors, HaveTheBytesThatTheFormatSays) {
  write_safetensors(path(),
                    {{"b", at::full({2, 1}, 1.0F)}, {"on", at::ones({1}, at::kBool)}, {"a", at::full({}, 2.0F)}},
                    {{"format", "pt"}});
  EXPECT_EQ(read_bytes(path()),
            std::string("\xC8\0\0\0\0\0\0\0", 8) +
                R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                R"("b":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},)"
                R"("on":{"dtype":"BOOL","shape":[1],"data_offsets":[12,13]}}   )" +
                std::string("\0\0\0\x40\0\0\x80\x3F\0\0\x80\x3F\1", 13));
  EXPECT_EQ(SafetensorsFile(path()).names(), (std::vector<std::string>{"a", "b", "on"}));
}

TEST_F(Safetensors, MayBeEmpty) {
  write_safetensors(path(), {});
  EXPECT_EQ(read_bytes(path()), file_of("{}      "));
  EXPECT_TRUE(SafetensorsFile(path()).names().empty());
  EXPECT_TRUE(read_safetensors(path()).empty());
}

TEST_F(Safetensors, AreReadAllAtOnceInTheOrderOfTheFile) {
  write_safetensors(path(), {{"b", at::ones({1})}, {"a", at::zeros({2})}, {"c", at::ones({3}, at::kLong)}});
  const NamedTensors tensors = read_safetensors(path());
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_EQ(tensors[0].first, "c");
  EXPECT_EQ(tensors[1].first, "a");
  EXPECT_EQ(tensors[2].first, "b");
  EXPECT_TRUE(tensors[0].second.equal(at::ones({3}, at::kLong)));
}

TEST_F(Safetensors, LieAtMultiplesOfTheirElements) {
  std::mt19937 random(1);
  NamedTensors tensors;
  for (const at::ScalarType dtype : kEveryDtype) {
    tensors.emplace_back(c10::toString(dtype), random_tensor(random, {3}, dtype));
  }
  write_safetensors(path(), tensors);
  const SafetensorsFile file(path());
  std::set<const void*> places;
  for (const std::string& name : file.names()) {
    const at::Tensor tensor = file.tensor(name);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % tensor.element_size(), 0U) << name;
    EXPECT_EQ(tensor.const_data_ptr(), file.tensor(name).const_data_ptr()) << name << " is a copy";
    places.insert(tensor.const_data_ptr());
  }
  EXPECT_EQ(places.size(), std::size(kEveryDtype));
}

TEST_F(Safetensors, KeepTheMappingAliveWithoutTheFile) {
  write_safetensors(path(), {{"x", at::arange(10000, at::kFloat)}});
  at::Tensor part;
  {
    const at::Tensor x = SafetensorsFile(path()).tensor("x");
    part = x.narrow(0, 5000, 3);
  }
  fs::remove(path());
  EXPECT_TRUE(part.equal(at::arange(5000, 5003, at::kFloat))) << part;
}

TEST_F(Safetensors, ReleaseTheirMappingsAndDescriptors) {
  const auto open_now = [&] {
    std::ifstream maps("/proc/self/maps");
    const std::string text{std::istreambuf_iterator<char>(maps), {}};
    const auto descriptors = std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
    return std::pair(text.find(folder_.string()) != std::string::npos, descriptors);
  };
  const auto before = open_now();
  {
    write_safetensors(path(), {{"x", at::ones({10})}});
    expect_error([&] { write_safetensors(path("missing/x"), {}); }, "could not be opened");
    write_bytes(path("bad"), "0123456789");
    expect_error([&] { const SafetensorsFile file(path("bad")); }, "announce");
    const at::Tensor x = SafetensorsFile(path()).tensor("x");
    EXPECT_TRUE(open_now().first);
    EXPECT_EQ(open_now().second, before.second);
  }
  EXPECT_EQ(open_now(), before);
}

TEST_F(Safetensors, MayBeWrittenInPlaceWithoutChangeToTheFile) {
  write_safetensors(path(), {{"x", at::zeros({4})}, {"y", at::zeros({4})}});
  const std::string before = read_bytes(path());
  const SafetensorsFile file(path());
  file.tensor("x").fill_(7);
  EXPECT_TRUE(file.tensor("x").equal(at::full({4}, 7.0F)));
  EXPECT_TRUE(file.tensor("y").equal(at::zeros({4})));
  EXPECT_EQ(read_bytes(path()), before);
  EXPECT_TRUE(SafetensorsFile(path()).tensor("x").equal(at::zeros({4})));
}

TEST_F(Safetensors, StayAsTheyWereWhenTheirFileIsReplaced) {
  write_safetensors(path(), {{"x", at::zeros({100000})}});
  const SafetensorsFile old(path());
  write_safetensors(path(), {{"x", at::ones({100000})}});
  EXPECT_TRUE(old.tensor("x").equal(at::zeros({100000})));
  EXPECT_TRUE(SafetensorsFile(path()).tensor("x").equal(at::ones({100000})));
}

TEST_F(Safetensors, OfForeignWritersAreCopiedWhereMisaligned) {
  write_bytes(path(), file_of(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                              R"("y":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
                              std::string("\5\0\0\x80\x3F\0\0\0\x40", 9)));
  const SafetensorsFile file(path());
  const at::Tensor y = file.tensor("y");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(y.const_data_ptr()) % 4, 0U);
  EXPECT_TRUE(y.equal(at::arange(1, 3, at::kFloat))) << y;
  EXPECT_EQ(file.tensor("x").item<int>(), 5);
}

TEST_F(Safetensors, OfForeignWritersHaveOnlyBoolsThatAreBools) {
  write_bytes(path(),
              file_of(R"({"x":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}})", std::string("\0\1\2\xFF", 4)));
  EXPECT_EQ(bytes_of(SafetensorsFile(path()).tensor("x")), std::string("\0\1\1\1", 4));
}

TEST_F(Safetensors, OfForeignWritersMayHaveTheirHeaderInAnyOrder) {
  write_bytes(path(), file_of(R"({"b":{"shape":[1],"data_offsets":[2,3],"dtype":"U8"},"empty":)"
                              R"({"data_offsets":[2,2],"dtype":"F64","shape":[7,0]},"__metadata__":null,)"
                              R"( "a":{"dtype":"U8","data_offsets":[0,2],"shape":[1,2]}})"
                              "\n\t",
                              "xyz"));
  const SafetensorsFile file(path());
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "empty", "b"}));
  EXPECT_EQ(bytes_of(file.tensor("a")), "xy");
  EXPECT_EQ(bytes_of(file.tensor("b")), "z");
  EXPECT_EQ(file.tensor("empty").sizes(), (std::vector<std::int64_t>{7, 0}));
  EXPECT_TRUE(file.metadata().empty());
}

TEST_F(Safetensors, SayWhichTensorIsNotThere) {
  write_safetensors(path(), {{"a", at::ones({1})}, {"b", at::ones({1})}, {"c", at::ones({1})}, {"d", at::ones({1})}});
  const SafetensorsFile file(path());
  EXPECT_TRUE(file.contains("a"));
  EXPECT_FALSE(file.contains("e"));
  expect_error([&] { file.tensor("e"); },
               "model.safetensors: there is no tensor 'e'.\n  Hint: it has tensor 'a', "
               "tensor 'b', tensor 'c', …");
}

struct Refusal {
  std::string file;
  std::string message;
};

// Returns a file whose header has one tensor with these fields.
std::string one(const std::string& fields, const std::string& data) {
  return file_of("{\"w\":{" + fields + "}}", data);
}

std::string nested(const std::string& before, std::size_t depth) {
  std::string text = before;
  for (std::size_t i = 0; i < depth; ++i) text += "[";
  return text;
}

std::vector<Refusal> refusals() {
  const std::string four = "1234";
  const std::string fits = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";
  return {
      {"", "model.safetensors: is 0 bytes long; a safetensors file has at least 8."},
      {"1234567", "model.safetensors: is 7 bytes long"},
      {std::string("PK\3\4\0\0\x08\x08\0\0\0\0", 12),
       "model.safetensors: its first 8 bytes announce a header of "
       "578712552184433488 bytes; at most 100000000 are allowed."},
      {std::string("\1\xE1\xF5\5\0\0\0\0", 8), "announce a header of 100000001 bytes; at most 100000000 are allowed"},
      {std::string("\0\xE1\xF5\5\0\0\0\0{}", 10), "announce a header of 100000000 bytes, but only 2 follow."},
      {std::string("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8), "announce a header of 18446744073709551615 bytes"},
      {std::string("\3\0\0\0\0\0\0\0{}", 10), "announce a header of 3 bytes, but only 2 follow.\n  Hint: was it"},

      {file_of(""), "its header is empty."},
      {file_of(" {}"), "its header should begin with '{', but begins with ' '."},
      {file_of("[]"), "its header should begin with '{', but begins with '['."},
      {file_of("\xEF\xBB\xBF{}"), "its header should begin with '{', but begins with '\xEF\xBF\xBD'."},
      {file_of("{"), "its header is not valid JSON at byte 2."},
      {file_of("{}}"), "its header is not valid JSON at byte 3."},
      {file_of(std::string("{}\0\0", 4)), "its header is not valid JSON at byte 3."},
      {file_of("{'w':1}"), "its header is not valid JSON at byte 2."},
      {file_of(R"({"w":NaN})"), "its header is not valid JSON at byte 6."},
      {file_of("{\"\xC3\":{" + fits + "}}", four), "its header is not UTF-8 at byte 4."},
      {file_of("{\"\xED\xA0\x80\":{" + fits + "}}", four), "its header is not UTF-8"},
      {file_of("{\"\\ud800\":{" + fits + "}}", four), "its header is not valid JSON"},
      {file_of("{\"a\nb\":{" + fits + "}}", four), "its header is not valid JSON"},

      {file_of("{\"w\":{" + fits + "},\"w\":{" + fits + "}}", four), "'w' appears twice in its header."},
      {file_of("{\"w\":{" + fits + "},\"\\u0077\":{" + fits + "}}", four), "'w' appears twice in its header."},
      {file_of(R"({"__metadata__":{},"__metadata__":{}})"), "'__metadata__' appears twice in its header."},
      {file_of(R"({"__metadata__":{"a":"b","a":"b"}})"), "__metadata__ has 'a' twice."},
      {file_of(R"({"__metadata__":[]})"), "__metadata__ should be an object, but is a list."},
      {file_of(R"({"__metadata__":"x"})"), "__metadata__ should be an object, but is 'x'."},
      {file_of(R"({"__metadata__":{"a":1}})"), "__metadata__ 'a' should be a string, but is 1."},
      {file_of(R"({"__metadata__":{"a":{}}})"), "__metadata__ 'a' should be a string, but is an object."},
      {file_of(R"({"__metadata__":{"a":null}})"), "__metadata__ 'a' should be a string, but is null."},

      {file_of(R"({"w":5})"), "model.safetensors: tensor 'w': it should be an object, but is 5."},
      {file_of(R"({"w":null})"), "tensor 'w': it should be an object, but is null."},
      {file_of(R"({"w":["F32",[1],[0,4]]})", four), "tensor 'w': it should be an object, but is a list."},
      {file_of(nested(R"({"w":)", 1'000'000)), "tensor 'w': it should be an object, but is a list."},
      {file_of(nested(R"({"w":{"dtype":)", 1'000'000)), "tensor 'w': its dtype should be a string, but is a list."},
      {file_of(nested(R"({"w":{"shape":)", 1'000'000)), "tensor 'w': its shape[0] should be a size, but is a list."},
      {file_of(R"({"a\nb\u0000":{}})"), R"(tensor 'a\nb\u0000': it has no dtype.)"},
      {file_of("{\"" + std::string(500, 'x') + "\":{}}"), "tensor '" + std::string(200, 'x') + "…': it has no dtype."},

      {one(R"("shape":[1],"data_offsets":[0,4])", four), "tensor 'w': it has no dtype."},
      {one(R"("dtype":"F32","data_offsets":[0,4])", four), "tensor 'w': it has no shape."},
      {one(R"("dtype":"F32","shape":[1])", four), "tensor 'w': it has no data_offsets."},
      {one(fits + R"(,"strides":[1])", four),
       "tensor 'w': it has an unknown field 'strides'.\n  Hint: the fields are dtype, shape, data_offsets."},
      {one(fits + R"(,"shape":[1])", four), "tensor 'w': it has 'shape' twice."},

      {one(R"("dtype":"F128","shape":[1],"data_offsets":[0,4])", four),
       "tensor 'w': its dtype is 'F128'.\n  Hint: the dtypes are BOOL, F4, U8, I8, "},
      {one(R"("dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3])", "123"), "tensor 'w': its dtype is 'F6_E2M3'."},
      {one(R"("dtype":"f32","shape":[1],"data_offsets":[0,4])", four), "tensor 'w': its dtype is 'f32'."},
      {one(R"("dtype":7,"shape":[1],"data_offsets":[0,4])", four), "its dtype should be a string, but is 7."},

      {one(R"("dtype":"F32","shape":1,"data_offsets":[0,4])", four), "its shape should be a list of sizes, but is 1."},
      {one(R"("dtype":"F32","shape":[1,-1],"data_offsets":[0,4])", four), "its shape[1] should be a size, but is -1."},
      {one(R"("dtype":"F32","shape":[-0],"data_offsets":[0,0])", ""), "its shape[0] should be a size, but is 0."},
      {one(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])", four), "its shape[0] should be a size, but is 1.0."},
      {one(R"("dtype":"F32","shape":[true],"data_offsets":[0,4])", four),
       "its shape[0] should be a size, but is true."},
      {one(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])", four), "its shape[0] should be a size, but is '1'."},
      {one(R"("dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0])", ""),
       "its shape[1] should be a size, but is 9223372036854775808."},
      {one(R"("dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0])", ""),
       "its shape[0] should be a size, but is 18446744073709551616."},
      {one(R"("dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0])", ""),
       "its 0 bytes do not hold a float32 of shape [4611686018427387904, 2], which takes more than a file has."},
      {one(R"("dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0])", ""), "more than a file has."},
      {one(R"("dtype":"F32","shape":[2,2],"data_offsets":[0,12])", "123456789012"),
       "model.safetensors: tensor 'w': its 12 bytes do not hold a float32 of shape [2, 2], which takes 16."},
      {one(R"("dtype":"BF16","shape":[],"data_offsets":[0,4])", four),
       "its 4 bytes do not hold a bfloat16 of shape [], which takes 2."},
      {one(R"("dtype":"F32","shape":[0],"data_offsets":[0,4])", four),
       "its 4 bytes do not hold a float32 of shape [0], which takes 0."},
      {one(R"("dtype":"F4","shape":[2,3],"data_offsets":[0,3])", "123"),
       "its shape [2, 3] cannot be that of a float4_e2m1fn_x2: the last dimension should be a multiple of 2."},
      {one(R"("dtype":"F4","shape":[],"data_offsets":[0,1])", "1"),
       "its shape [] cannot be that of a float4_e2m1fn_x2"},

      {one(R"("dtype":"F32","shape":[1],"data_offsets":4)", four),
       "its data_offsets should be a list of two offsets, but is 4."},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,"4"])", four),
       "its data_offsets[1] should be an offset, but is '4'."},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[4])", four), "its data_offsets should be two, but are [4]."},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,4])", four), "should be two, but are [0, 4, 4]."},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])", four),
       "its data_offsets[0] should be an offset, but is -4."},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", four),
       "its data_offsets [4, 0] end before they begin."},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", four),
       "its data_offsets [0, 8] reach beyond the file, which has 4 bytes of data."},
      {one(R"("dtype":"U8","shape":[4],"data_offsets":[18446744073709551612,18446744073709551615])", four),
       "reach beyond the file"},
      {file_of(R"({"v":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"U8","shape":[2],)"
               R"("data_offsets":[2,4]}})",
               four),
       "tensor 'w': its data_offsets [2, 4] overlap those of tensor 'v', [0, 3]."},
      {file_of(R"({"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[0],)"
               R"("data_offsets":[2,2]}})",
               four),
       "tensor 'w': its data_offsets [2, 2] overlap those of tensor 'v', [0, 4]."},
      {file_of(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[2],)"
               R"("data_offsets":[2,4]}})",
               four),
       "tensor 'w': its data_offsets [2, 4] should begin at 1: the bytes before them belong to no tensor."},
      {one(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])", four), "its data_offsets [1, 4] should begin at 0"},
      {one(R"("dtype":"U8","shape":[3],"data_offsets":[0,3])", four),
       "its data has 4 bytes, but its tensors end at 3: the bytes after that belong to no tensor."},
      {file_of("{}", four),
       "its data has 4 bytes, but its tensors end at 0: the bytes after that belong to no tensor."},
  };
}

TEST_F(Safetensors, AreRefusedByWhatIsWrong) {
  for (const auto& [file, message] : refusals()) {
    SCOPED_TRACE(file.substr(0, 200));
    expect_error([&bytes = file] { parse_safetensors_header(bytes, "model.safetensors"); }, message);
    write_bytes(path(), file);
    expect_error([&] { const SafetensorsFile opened(path()); }, message);
  }
}

TEST_F(Safetensors, AreRefusedWhenTruncatedAnywhere) {
  write_safetensors(path(), {{"a", at::ones({3})}, {"b", at::ones({2}, at::kLong)}}, {{"x", "y"}});
  const std::string whole = read_bytes(path());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    expect_error([&] { parse_safetensors_header(whole.substr(0, size), "cut"); }, "cut: ");
  }
  EXPECT_EQ(parse_safetensors_header(whole, "whole").entries.size(), 2U);
}

TEST_F(Safetensors, AreNotReadFromAnythingButRegularFiles) {
  expect_error([&] { const SafetensorsFile file(path("none")); },
               "none: could not be opened: No such file or directory.");
  expect_error([&] { const SafetensorsFile file(folder_); }, ": is a directory; give the name of a file.");
  expect_error([] { const SafetensorsFile file("/dev/null"); },
               "/dev/null: is not a regular file, and so cannot be mapped.");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_error([&] { const SafetensorsFile file(path("pipe")); }, "pipe: is not a regular file");
}

// When write_safetensors refuses to write, the previous file stays.
class SafetensorsWriter : public Safetensors {
 protected:
  void expect_refusal(const NamedTensors& tensors, const std::string& message,
                      const std::map<std::string, std::string>& metadata = {}) const {
    write_safetensors(path(), {{"old", at::ones({3})}});
    const std::string before = read_bytes(path());
    expect_error([&] { write_safetensors(path(), tensors, metadata); }, message);
    EXPECT_EQ(read_bytes(path()), before);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  }
};

TEST_F(SafetensorsWriter, RefusesNamesThatCannotBeInAFile) {
  expect_refusal({{"w", at::ones({1})}, {"w", at::ones({2}, at::kLong)}},
                 "model.safetensors: there are two tensors named 'w'.");
  expect_refusal({{"__metadata__", at::ones({1})}}, "a tensor cannot be named '__metadata__'.");
  expect_refusal({{"a\xFF", at::ones({1})}}, "the name of tensor 'a\xEF\xBF\xBD' is not UTF-8.");
  expect_refusal({}, "metadata 'a\xEF\xBF\xBD' is not UTF-8.", {{"a\xFF", "b"}});
  expect_refusal({}, "metadata 'a' is not UTF-8.", {{"a", "\xC3"}});
}

TEST_F(SafetensorsWriter, RefusesTensorsThatCannotBeInAFile) {
  expect_refusal({{"w", at::Tensor()}}, "model.safetensors: tensor 'w' is undefined.");
  expect_refusal({{"w", at::ones({2, 2}).to_sparse()}},
                 "tensor 'w' is not strided, as safetensors are.\n  Hint: to_dense");
  expect_refusal({{"w", at::empty({2}, at::kMeta)}}, "tensor 'w' has no memory: it is on meta.");
  expect_refusal(
      {{"w", at::ones({2}, at::kComplexDouble)}},
      "tensor 'w': its dtype is ComplexDouble, which safetensors do not support.\n  Hint: the dtypes are bool, "
      "float4_e2m1fn_x2, uint8, ");
  expect_refusal({{"w", at::empty({}, at::kFloat4_e2m1fn_x2)}},
                 "tensor 'w': a float4_e2m1fn_x2 should have a dimension, along which its values are packed.");
  expect_refusal({{"w", at::ones({1}).expand({1LL << 61})}},
                 "tensor 'w': its shape [2305843009213693952] takes more bytes than a file has.");
  const at::Tensor half_of_that = at::ones({1}).expand({1LL << 60});
  expect_refusal({{"v", half_of_that}, {"w", half_of_that}},
                 "tensor 'w': its shape [1152921504606846976] takes more bytes than a file has.");
  const at::Tensor freed = at::ones({2, 3});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  expect_refusal({{"v", at::ones({2})}, {"w", freed}},
                 "tensor 'w' has no memory: its storage has 0 of 24 bytes. Was it freed?");
}

TEST_F(SafetensorsWriter, RefusesAHeaderThatIsTooLarge) {
  std::string text;
  text.resize(100'000'000, 'x');
  expect_refusal({}, "model.safetensors: its header would have 100000032 bytes; at most 100000000 are allowed.",
                 {{"a", text}});
}

TEST_F(SafetensorsWriter, RefusesAnythingButRegularFiles) {
  expect_error([&] { write_safetensors(folder_, {}); }, ": is a directory; give the name of a file.");
  expect_error([&] { write_safetensors("", {}); }, ": could not be written: it names no file.");
  expect_error([&] { write_safetensors(path("new/"), {}); }, "new/: could not be written: it names no file.");
  expect_error([&] { write_safetensors(path("new/x"), {}); },
               "new/x: could not be written, as its directory could not be opened: No such file or directory.");
  expect_error([] { write_safetensors("/dev/null", {}); },
               "/dev/null: is not a regular file, and is not replaced by one.");
}

// Limits the size of files in a scope, so that writing more is an error.
class SmallDisk {
 public:
  explicit SmallDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  ~SmallDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_ = {};
};

TEST_F(SafetensorsWriter, LeavesTheOldFileWhenTheDiskIsFull) {
  const std::string message = "model.safetensors: could not be written: File too large.";
  const SmallDisk disk(4096);
  expect_refusal({{"w", at::ones({100000})}}, message);
  expect_refusal({{"v", at::ones({10})}, {"w", at::ones({1010})}}, message);
  expect_refusal({}, message, {{"a", std::string(5000, 'x')}});
}

// Makes file permissions apply in a scope even if this process runs as root.
class Unprivileged {
 public:
  Unprivileged() {
    if (root_) {
      EXPECT_EQ(::seteuid(65534), 0);
    }
  }
  Unprivileged(const Unprivileged&) = delete;
  Unprivileged& operator=(const Unprivileged&) = delete;
  ~Unprivileged() {
    if (root_) {
      EXPECT_EQ(::seteuid(0), 0);
    }
  }

 private:
  bool root_ = ::geteuid() == 0;
};

TEST_F(SafetensorsWriter, LeavesTheOldFileWhenItsFolderCannotBeWritten) {
  write_safetensors(path(), {{"old", at::ones({3})}});
  const std::string before = read_bytes(path());
  ASSERT_EQ(::chmod(folder_.c_str(), 0555), 0);
  {
    const Unprivileged process;
    expect_error([&] { write_safetensors(path(), {{"w", at::ones({1})}}); },
                 "could not be written: Permission denied.");
  }
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  EXPECT_EQ(read_bytes(path()), before);
}

TEST_F(SafetensorsWriter, PassesOverNamesThatOthersHaveLeft) {
  std::vector<std::string> others;
  for (int i = 0; i < 2000; ++i) {
    others.push_back(path(".penstock-" + std::to_string(::getpid()) + "-" + std::to_string(i) + ".part"));
    write_bytes(others.back(), "other");
  }
  write_safetensors(path(), {{"w", at::ones({1})}});
  EXPECT_TRUE(SafetensorsFile(path()).contains("w"));
  for (const std::string& other : others) {
    EXPECT_EQ(read_bytes(other), "other");
    fs::remove(other);
  }
}

TEST_F(SafetensorsWriter, ReplacesALinkAndNotWhatItNames) {
  write_bytes(path("other"), "other");
  fs::create_symlink("other", path());
  write_safetensors(path(), {{"w", at::ones({1})}});
  EXPECT_FALSE(fs::is_symlink(path()));
  EXPECT_EQ(read_bytes(path("other")), "other");
  EXPECT_TRUE(SafetensorsFile(path()).contains("w"));
}

TEST_F(SafetensorsWriter, TakesAFileInTheFolderOfTheProcessAndOneOfTheLongestName) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  write_safetensors("here", {{"w", at::ones({1})}});
  fs::current_path(before);
  EXPECT_TRUE(SafetensorsFile(path("here")).contains("w"));
  write_safetensors(path(std::string(255, 'x')), {{"w", at::ones({1})}});
  EXPECT_TRUE(SafetensorsFile(path(std::string(255, 'x'))).contains("w"));
}

TEST_F(SafetensorsWriter, GivesAFileThePermissionsOfAnyOther) {
  const mode_t mask = ::umask(027);
  write_safetensors(path(), {});
  ::umask(mask);
  EXPECT_EQ(fs::status(path()).permissions(), fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
}

TEST_F(SafetensorsWriter, GivesReadersAWholeFileWhileManyWrite) {
  constexpr int kRounds = 20;
  write_safetensors(path(), {{"x", at::zeros({5000})}});
  std::vector<std::thread> threads;
  for (int writer = 1; writer <= 3; ++writer) {
    threads.emplace_back([&, writer] {
      for (int i = 0; i < kRounds; ++i)
        write_safetensors(path(), {{"x", at::full({5000}, static_cast<float>(writer))}});
    });
  }
  for (int i = 0; i < 5 * kRounds; ++i) {
    const at::Tensor x = SafetensorsFile(path()).tensor("x");
    EXPECT_TRUE(x.equal(x.select(0, 0).expand({5000})));
  }
  for (std::thread& thread : threads) thread.join();
}

// Reads the files that safetensors_reference.py has written into the directory $PENSTOCK_SAFETENSORS.
class SafetensorsReference : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const folder = std::getenv("PENSTOCK_SAFETENSORS");
    ASSERT_NE(folder, nullptr) << "PENSTOCK_SAFETENSORS does not name the folder of safetensors_reference.py";
    folder_ = folder;
  }

  fs::path folder_;
};

std::string decoded(const std::string& word) {
  std::string bytes;
  for (std::size_t i = 0; word != "-" && i < word.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(word.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

at::ScalarType dtype_named(const std::string& name) {
  for (const at::ScalarType dtype : kEveryDtype) {
    if (c10::getDtypeNames(dtype).first == name) return dtype;
  }
  throw std::runtime_error("no dtype is called " + name);
}

struct Listing {
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;
};

Listing read_listing(const fs::path& path) {
  Listing listing;
  std::ifstream in(path);
  std::string kind;
  std::string name;
  for (std::string value; in >> kind >> name >> value;) {
    if (kind == "metadata") {
      listing.metadata[decoded(name)] = decoded(value);
      continue;
    }
    std::string shape_text;
    std::string bytes;
    in >> shape_text >> bytes;
    std::vector<std::int64_t> shape;
    std::istringstream sizes(shape_text == "-" ? "" : shape_text);
    for (std::string size; std::getline(sizes, size, 'x');) shape.push_back(std::stoll(size));
    listing.tensors.emplace_back(decoded(name), from_bytes(decoded(bytes), shape, dtype_named(value)));
  }
  return listing;
}

TEST_F(SafetensorsReference, ReadsTheirFilesAndWritesThemAgain) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (entry.path().extension() != ".txt" || entry.path().stem() == "mutations") continue;
    SCOPED_TRACE(entry.path());
    Listing listing = read_listing(entry.path());
    const SafetensorsFile file(fs::path(entry.path()).replace_extension(".safetensors"));
    EXPECT_EQ(file.metadata(), listing.metadata);
    EXPECT_EQ(file.names().size(), listing.tensors.size());
    for (auto& [name, tensor] : listing.tensors) {
      const at::Tensor read = file.tensor(name);
      EXPECT_EQ(read.scalar_type(), tensor.scalar_type());
      EXPECT_EQ(read.sizes(), tensor.sizes());
      EXPECT_EQ(bytes_of(read), bytes_of(tensor));
      tensor = with_odd_strides(read);
    }
    write_safetensors(fs::path(entry.path()).replace_extension(".ours.safetensors"), listing.tensors, listing.metadata);
    ++files;
  }
  EXPECT_GT(files, 0);
}

// Reasons for which we may refuse a file that the Python package accepts.
bool stricter(const std::string& message) {
  for (const char* words :
       {"appears twice in its header", "__metadata__ has ", "unknown field", "should begin with '{'",
        "its dtype is 'F6_", "cannot be that of a float4", "it should be an object, but is a list",
        "which takes more than a file has", "should be a size, but is 9999999999999999999."}) {
    if (message.find(words) != std::string::npos) return true;
  }
  return false;
}

TEST_F(SafetensorsReference, RefusesWhatTheyRefuse) {
  std::ifstream in(folder_ / "mutations.txt");
  std::map<std::string, int> agreed;
  std::string bytes;
  for (std::string outcome; in >> outcome >> bytes; ++agreed[outcome]) {
    try {
      parse_safetensors_header(decoded(bytes), "mutation");
      EXPECT_EQ(outcome, "accepted") << decoded(bytes);
    } catch (const SafetensorsError& error) {
      EXPECT_TRUE(outcome == "refused" || stricter(error.what())) << error.what() << "\n" << decoded(bytes);
    }
  }
  EXPECT_GT(agreed["accepted"], 100);
  EXPECT_GT(agreed["refused"], 1000);
}

}  // namespace
}  // namespace penstock::internal::testing
