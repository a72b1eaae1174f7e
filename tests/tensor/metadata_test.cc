#include "penstock/tensor/metadata.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

using Metas = std::vector<std::optional<TensorMeta>>;

std::string text(const Metas& metas) {
  std::string all;
  for (const auto& meta : metas) all += (meta ? to_string(*meta) : "None") + "; ";
  return all;
}
std::string bytes_text(std::string_view bytes) {
  std::string all;
  for (const char byte : bytes) all += std::to_string(static_cast<unsigned char>(byte)) + " ";
  return all;
}

TEST(TensorMeta, HasAllOfATensorButItsValues) {
  const TensorMeta meta(at::zeros({3, 2}, at::kDouble).t().requires_grad_());
  EXPECT_EQ(meta.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(meta.strides, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(meta.dtype, at::kDouble);
  EXPECT_EQ(meta.device, at::Device(at::kCPU));
  EXPECT_TRUE(meta.requires_grad);
  EXPECT_EQ(TensorMeta(at::empty({2}, at::TensorOptions().device(at::kMeta))).device, at::Device(at::kMeta));
}

TEST(TensorMeta, IsEqualWhenAllFieldsAre) {
  const TensorMeta meta(at::zeros({2, 3}));
  EXPECT_EQ(meta, TensorMeta(at::ones({2, 3})));
  EXPECT_EQ(meta, TensorMeta({2, 3}, {3, 1}, at::kFloat, at::kCPU, false));
  EXPECT_NE(meta, TensorMeta({2, 4}, {3, 1}, at::kFloat, at::kCPU, false));
  EXPECT_NE(meta, TensorMeta({2, 3}, {4, 1}, at::kFloat, at::kCPU, false));
  EXPECT_NE(meta, TensorMeta({2, 3}, {3, 1}, at::kDouble, at::kCPU, false));
  EXPECT_NE(meta, TensorMeta({2, 3}, {3, 1}, at::kFloat, at::kMeta, false));
  EXPECT_NE(meta, TensorMeta({2, 3}, {3, 1}, at::kFloat, at::kCPU, true));
}

TEST(TensorMeta, IsPrintedWithFieldsThatAreNotTheDefault) {
  EXPECT_EQ(to_string(TensorMeta(at::zeros({2, 3}))), "float32[2, 3]");
  EXPECT_EQ(to_string(TensorMeta(at::zeros({}, at::kLong))), "int64[]");
  EXPECT_EQ(to_string(TensorMeta(at::zeros({0, 3}, at::kBool))), "bool[0, 3]");
  EXPECT_EQ(to_string(TensorMeta(at::zeros({3, 2}).t())), "float32[2, 3] with strides [1, 2]");
  EXPECT_EQ(to_string(TensorMeta(at::zeros({2}, at::kBFloat16).requires_grad_())), "bfloat16[2], requires grad");
  EXPECT_EQ(to_string(TensorMeta(at::empty({2}, at::TensorOptions().device(at::kMeta)))), "float32[2] on meta");
}

TEST(TensorMetas, AreTakenOfAllLeavesInOrder) {
  const c10::IValue value =
      tuple({counting({2}), dict({{"mask", list({1, counting({3}, at::kLong)})}}), c10::IValue(), at::Tensor()});
  const Metas expected{TensorMeta({2}, {1}, at::kFloat, at::kCPU, false), std::nullopt,
                       TensorMeta({3}, {1}, at::kLong, at::kCPU, false), std::nullopt, std::nullopt};
  const Metas found = extract_tensor_metas(value);
  EXPECT_EQ(found, expected) << "found:    " << text(found) << "\nexpected: " << text(expected);
}

TEST(MetadataDifferences, AreOneSentenceEach) {
  const TensorMeta expected({4, 2}, {2, 1}, at::kFloat, at::kCPU, false);
  EXPECT_EQ(metadata_differences(expected, expected), std::vector<std::string>{});
  EXPECT_EQ(
      metadata_differences(expected, TensorMeta({4, 2, 1}, {2, 1, 1}, at::kLong, at::kCPU, false)),
      (std::vector<std::string>{"its shape is [4, 2, 1], expected [4, 2]", "its stride is [2, 1, 1], expected [2, 1]",
                                "its dtype is int64, expected float32"}));
  EXPECT_EQ(metadata_differences(expected, TensorMeta({4, 2}, {1, 4}, at::kFloat, at::kCPU, false)),
            std::vector<std::string>{"its stride is [1, 4], expected [2, 1]"});
}

TEST(MetadataDifferences, DoNotCountDeviceOrRequiresGrad) {
  const TensorMeta expected({4, 2}, {2, 1}, at::kFloat, at::kCPU, false);
  EXPECT_EQ(metadata_differences(expected, TensorMeta({4, 2}, {2, 1}, at::kFloat, at::kMeta, true)),
            std::vector<std::string>{});
}

TEST(ValidateTensorMetadata, SaysWhichTensorAndWhatDiffers) {
  const TensorMeta expected({4, 2}, {2, 1}, at::kFloat, at::kCPU, false);
  EXPECT_NO_THROW(validate_tensor_metadata("stage 2, input 0", expected, expected));
  expect_error<PipeliningShapeError>(
      [&] {
        validate_tensor_metadata("stage 2, input 0", expected, TensorMeta({2, 4}, {4, 1}, at::kLong, at::kCPU, false));
      },
      "stage 2, input 0: its shape is [2, 4], expected [4, 2]; its stride is [4, 1], expected [2, 1]; its dtype is "
      "int64, expected float32.");
}

TEST(ValidateTensorsMetadata, ComparesElementByElement) {
  const TensorMeta one({4, 2}, {2, 1}, at::kFloat, at::kCPU, false);
  const TensorMeta other({4, 2}, {2, 1}, at::kLong, at::kCPU, false);
  const auto validate = [](const Metas& expected, const Metas& found) {
    return [&] { validate_tensors_metadata("stage 2, inputs", expected, found); };
  };
  const Metas expected{one, std::nullopt};
  EXPECT_NO_THROW(validate(expected, expected)());
  EXPECT_NO_THROW(validate({}, {})());
  const Metas longer{one, std::nullopt, one};
  expect_error<PipeliningShapeError>(validate(expected, longer), "stage 2, inputs: there are 3 tensors, expected 2.");
  const Metas extra{one, one};
  expect_error<PipeliningShapeError>(validate(expected, extra),
                                     "stage 2, inputs[1]: it is float32[4, 2], expected None.");
  const Metas missing{std::nullopt, std::nullopt};
  expect_error<PipeliningShapeError>(validate(expected, missing),
                                     "stage 2, inputs[0]: it is None, expected float32[4, 2].");
  const Metas different{other, std::nullopt};
  expect_error<PipeliningShapeError>(validate(expected, different),
                                     "stage 2, inputs[0]: its dtype is int64, expected float32.");
}

// Encoding

std::vector<at::ScalarType> all_dtypes() {
  std::vector<at::ScalarType> dtypes;
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (dtype != at::ScalarType::Undefined) dtypes.push_back(dtype);
  }
  return dtypes;
}

TensorMeta random_meta(Random& random) {
  static const std::vector<at::ScalarType> kAll = all_dtypes();
  static const std::vector<at::Device> kDevices{at::Device(at::kCPU),     at::Device(at::kMeta),
                                                at::Device(at::kCUDA),    at::Device(at::kCUDA, 0),
                                                at::Device(at::kCUDA, 7), at::Device(at::kXPU, 120)};
  std::vector<std::int64_t> shape;
  std::int64_t numel = 1;
  for (std::int64_t rank = random.between(0, 8); rank > 0; --rank) {
    const std::int64_t most = random.percent(10) ? 1'000'000 : 300;
    shape.push_back(random.percent(5) ? 0 : random.between(1, std::min(most, (std::int64_t{1} << 50) / numel)));
    numel *= std::max<std::int64_t>(shape.back(), 1);
  }
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<std::int64_t>(shape[i], 1);
  }
  if (random.percent(40)) {
    for (std::int64_t& stride : strides) {
      if (random.percent(50)) stride = random.between(0, random.percent(10) ? 1'000'000'000 : 10);
    }
  }
  return {shape, strides, random.element_of(kAll), random.element_of(kDevices), random.percent(30)};
}
Metas random_metas(Random& random) {
  Metas metas;
  for (std::int64_t count = random.between(0, 5); count > 0; --count) {
    metas.push_back(random.percent(20) ? std::nullopt : std::optional(random_meta(random)));
  }
  return metas;
}

class EncodedMetadata : public ::testing::Test {
 protected:
  const std::uint64_t seed_ = from_environment("PENSTOCK_SEED", 20240229);
  const std::uint64_t cases_ = from_environment("PENSTOCK_CASES", 20'000);

  std::string name_of_case(std::uint64_t number) const {
    return "PENSTOCK_SEED=" + std::to_string(seed_) + ", case " + std::to_string(number) + "\n";
  }
};

TEST_F(EncodedMetadata, DecodesToTheSame) {
  std::size_t bytes = 0;
  for (std::uint64_t number = 0; number < cases_; ++number) {
    Random random(seed_, number);
    const Metas metas = random_metas(random);
    const std::string encoded = encode_metadata(metas);
    bytes += encoded.size();
    try {
      const Metas decoded = decode_metadata(encoded);
      ASSERT_EQ(decoded, metas) << name_of_case(number) << "expected: " << text(metas)
                                << "\nfound:    " << text(decoded);
    } catch (const PipeliningShapeError& error) {
      FAIL() << name_of_case(number) << text(metas) << "\n" << error.what();
    }
  }
  std::cout << "PENSTOCK_SEED=" << seed_ << ": " << cases_ << " lists in " << bytes << " bytes\n";
}

TEST_F(EncodedMetadata, OfEveryDtypeDecodesToTheSame) {
  for (const at::ScalarType dtype : all_dtypes()) {
    const Metas metas{TensorMeta({2, 3}, {3, 1}, dtype, at::kCPU, false)};
    const Metas decoded = decode_metadata(encode_metadata(metas));
    EXPECT_EQ(decoded, metas) << "expected: " << text(metas) << "\nfound:    " << text(decoded);
  }
}

TEST_F(EncodedMetadata, OfAContiguousTensorTakesAboutTenBytes) {
  const Metas metas{TensorMeta({32, 1024, 1024}, {1'048'576, 1'024, 1}, at::kFloat, at::kCPU, true)};
  EXPECT_LE(encode_metadata(metas).size(), 12U) << bytes_text(encode_metadata(metas));
}

TEST_F(EncodedMetadata, TruncatedAnywhereIsAnError) {
  for (std::uint64_t number = 0; number < 500; ++number) {
    Random random(seed_, number);
    const Metas metas = random_metas(random);
    const std::string encoded = encode_metadata(metas);
    for (std::size_t length = 0; length < encoded.size(); ++length) {
      const std::string cut = encoded.substr(0, length);
      EXPECT_THROW(decode_metadata(cut), PipeliningShapeError) << name_of_case(number) << text(metas) << "\n"
                                                               << bytes_text(encoded) << "cut to " << length;
    }
  }
}

TEST_F(EncodedMetadata, WithTrailingBytesIsAnError) {
  expect_error<PipeliningShapeError>([] { decode_metadata(encode_metadata({}) + "xy"); },
                                     "the metadata of a message is damaged: 2 bytes follow its end.");
}

// Returns true if a tensor could have this metadata.
bool possible(const TensorMeta& meta) {
  const auto negative = [](std::int64_t number) { return number < 0; };
  return meta.shape.size() == meta.strides.size() && std::none_of(meta.shape.begin(), meta.shape.end(), negative) &&
         std::none_of(meta.strides.begin(), meta.strides.end(), negative) && meta.device.index() >= -1 &&
         (!meta.device.is_cpu() || meta.device.index() <= 0);
}

// Damaged bytes may decode to wrong metadata, but to valid metadata.
class DamagedMetadata : public EncodedMetadata {
 protected:
  void try_damaged(const std::string& damaged, std::uint64_t number) {
    try {
      const Metas decoded = decode_metadata(damaged);
      ++decoded_;
      EXPECT_EQ(decode_metadata(encode_metadata(decoded)), decoded) << name_of_case(number) << bytes_text(damaged);
      for (const auto& meta : decoded) {
        EXPECT_TRUE(!meta || possible(*meta)) << name_of_case(number) << bytes_text(damaged) << "\n" << text(decoded);
      }
    } catch (const PipeliningShapeError&) {
      ++errors_;
    } catch (const std::exception& error) {
      FAIL() << name_of_case(number) << bytes_text(damaged) << "\nno PipeliningShapeError, but: " << error.what();
    }
  }
  void TearDown() override {
    std::cout << "PENSTOCK_SEED=" << seed_ << ": " << errors_ << " errors, " << decoded_ << " decoded to something\n";
    EXPECT_GT(errors_, 0U);
  }

 private:
  std::uint64_t errors_ = 0;
  std::uint64_t decoded_ = 0;
};

TEST_F(DamagedMetadata, InAnyByteIsAnErrorOrOtherMetadata) {
  for (std::uint64_t number = 0; number < 200 && !HasFailure(); ++number) {
    Random random(seed_, number);
    const std::string encoded = encode_metadata(random_metas(random));
    for (std::size_t at = 0; at < encoded.size() && !HasFailure(); ++at) {
      for (int change = 1; change < 256 && !HasFailure(); ++change) {
        std::string damaged = encoded;
        damaged[at] = static_cast<char>(static_cast<unsigned char>(damaged[at]) ^ change);
        try_damaged(damaged, number);
      }
    }
  }
}

TEST_F(DamagedMetadata, ByTheGreatestNumbersIsAnErrorOrOtherMetadata) {
  const std::string ones(8, '\xff');
  for (std::uint64_t number = 0; number < 500 && !HasFailure(); ++number) {
    Random random(seed_, number);
    const std::string encoded = encode_metadata(random_metas(random));
    for (std::size_t at = 0; at < encoded.size() && !HasFailure(); ++at) {
      for (const char* end : {"\x7f", "\xff\x01", "\xff\x7f", "\xff\xff\xff\x01"}) {
        std::string damaged = encoded;
        try_damaged(damaged.replace(at, 1, ones + end), number);
      }
    }
  }
}

TEST_F(EncodedMetadata, OfADeviceThatCannotBeIsAnError) {
  const auto encoded = [](at::Device device) {
    return encode_metadata(Metas{TensorMeta({2}, {1}, at::kFloat, device, false)});
  };
  const auto with_index = [](std::string bytes, const std::string& other, char index) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != other.at(i)) bytes[i] = index;
    }
    return bytes;
  };
  const std::string first_gpu = encoded(at::Device(at::kCUDA, 1));
  const std::string second_gpu = encoded(at::Device(at::kCUDA, 2));
  ASSERT_EQ(first_gpu.size(), second_gpu.size());
  EXPECT_THROW(decode_metadata(with_index(first_gpu, second_gpu, '\xc8')), PipeliningShapeError);
  const std::string no_cpu = encoded(at::Device(at::kCPU));
  const std::string first_cpu = encoded(at::Device(at::kCPU, 0));
  ASSERT_EQ(no_cpu.size(), first_cpu.size());
  EXPECT_THROW(decode_metadata(with_index(no_cpu, first_cpu, '\x09')), PipeliningShapeError);
}

TEST_F(EncodedMetadata, OfAnotherVersionSaysWhich) {
  std::string encoded = encode_metadata({});
  encoded[0] = 99;
  expect_error<PipeliningShapeError>([&] { decode_metadata(encoded); },
                                     "the metadata of a message is damaged: its version is 99, expected 1.");
}

TEST_F(EncodedMetadata, ThatPromisesTooMuchIsAnErrorAndTakesNoMemory) {
  std::string encoded = encode_metadata(Metas{std::nullopt});
  const std::string promise = "\xff\xff\xff\xff\xff\xff\xff\xff\x7f";
  for (std::size_t at = 1; at < encoded.size(); ++at) {
    std::string damaged = encoded;
    damaged.replace(at, 1, promise);
    EXPECT_THROW(decode_metadata(damaged), PipeliningShapeError) << bytes_text(damaged);
  }
  EXPECT_THROW(decode_metadata(""), PipeliningShapeError);
}

}  // namespace
}  // namespace penstock::internal::testing
