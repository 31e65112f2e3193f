// Tests that the stand-in for cuBLAS refuses what cuBLAS's documentation excludes
// (tests/simt/cublas_rules.h). Each test covers one rule by changing one property of an accepted product.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "runtime/device/device.h"
#include "tests/simt/cublas_stand_in.h"

namespace gradwire {
namespace {

constexpr int64_t kRows = 16, kColumns = 24, kInner = 8, kBatch = 3;
constexpr size_t kWorkspace = 4096;

struct Matrix {
  cudaDataType type = CUDA_R_16BF;
  int64_t rows = 0, columns = 0, ld = 0, stride = 0;
  int32_t order = CUBLASLT_ORDER_COL;
  int64_t offset = 0;  // offset of the matrix's pointer in bytes
};

// Describes a product. The default is an accepted BF16 product with bias, GELU and stored pre-activations.
struct Call {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType scale = CUDA_R_32F;
  cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
  Matrix a{.rows = kRows, .columns = kInner, .ld = kRows};
  Matrix b{.rows = kInner, .columns = kColumns, .ld = kInner};
  Matrix c{.rows = kRows, .columns = kColumns, .ld = kRows};
  Matrix d = c;
  uint32_t epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  bool has_bias = true, has_aux = true;
  int64_t bias_offset = 0, aux_offset = 0, workspace_offset = 0;
  int32_t bias_type = -1, aux_type = -1;
  int64_t aux_ld = kRows, aux_stride = 0;
  int32_t batch = 1;
  uint32_t alignment = 256;
  size_t planned_workspace = kWorkspace, workspace = kWorkspace;

  // Returns the default product without an epilogue.
  static Call plain() {
    Call call;
    call.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    call.has_bias = call.has_aux = false;
    return call;
  }
  // Returns a batch of kBatch products whose matrices are contiguous.
  static Call several() {
    Call call;
    call.batch = kBatch, call.alignment = 128;
    call.a.stride = kRows * kInner, call.b.stride = kInner * kColumns;
    call.c.stride = call.d.stride = call.aux_stride = kRows * kColumns;
    return call;
  }
  void set_types(cudaDataType ab, cudaDataType cd) {
    a.type = b.type = ab;
    c.type = d.type = cd;
  }
};

class CublasRules : public ::testing::Test {
 public:
  void SetUp() override {
    if (cuda_device_count() < 1) GTEST_SKIP() << "GRADWIRE_STANDIN_GPUS=0";
    device_ = Device::cuda(0);
    stream_ = Stream::create(device_, "test");
    for (Buffer* buffer : {&a_, &b_, &d_, &bias_, &aux_, &workspace_}) {
      *buffer = Buffer(device_, size_t{1} << 14);
      fill_zero(stream_, buffer->data(), buffer->bytes());
    }
    ASSERT_EQ(cublasCreate(&handle_), CUBLAS_STATUS_SUCCESS);
  }
  void TearDown() override {
    if (handle_ == nullptr) return;
    stream_.synchronize();
    cublasDestroy(handle_);
  }

  // Returns the heuristic's error for `planned`, or else the error of product `called` with the algorithm for
  // `planned`. Returns SUCCESS if the heuristic and the product succeed.
  cublasStatus_t result(const Call& planned, const Call& called) {
    const auto lt = reinterpret_cast<cublasLtHandle_t>(handle_);
    cublasLtMatmulHeuristicResult_t found = {};
    int count = -1;
    const auto plan = describe(planned);
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt, plan.operation, plan.a, plan.b, plan.c,
                                                                 plan.d, plan.preference, 1, &found, &count);
    EXPECT_EQ(count, status == CUBLAS_STATUS_SUCCESS ? 1 : 0);
    destroy(plan);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const auto call = describe(called);
    const float alpha = 1.0f, beta = 0.0f;
    auto at = [](const Buffer& buffer, int64_t offset) { return buffer.as<char>() + offset; };
    const cublasStatus_t refused = cublasLtMatmul(
        lt, call.operation, &alpha, at(a_, called.a.offset), call.a, at(b_, called.b.offset), call.b, &beta,
        at(d_, called.d.offset), call.c, at(d_, called.d.offset), call.d, &found.algo,
        at(workspace_, called.workspace_offset), called.workspace, stream_.native());
    destroy(call);
    return refused;
  }
  cublasStatus_t result(const Call& call) { return result(call, call); }
  template <typename Change>
  cublasStatus_t result(Call call, const Change& change) {
    EXPECT_EQ(result(call), CUBLAS_STATUS_SUCCESS);
    change(call);
    return result(call);
  }
  // Returns the status of a changed product that is run with the algorithm for the unchanged `call`.
  template <typename Change>
  cublasStatus_t result_after_planning(const Call& call, const Change& change) {
    EXPECT_EQ(result(call), CUBLAS_STATUS_SUCCESS);
    Call changed = call;
    change(changed);
    return result(call, changed);
  }

  Stream stream_;
  Buffer a_, b_, d_, bias_, aux_, workspace_;

 private:
  struct Descriptors {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
  };
  Descriptors describe(const Call& call) {
    Descriptors out;
    EXPECT_EQ(cublasLtMatmulDescCreate(&out.operation, call.compute, call.scale), CUBLAS_STATUS_SUCCESS);
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      EXPECT_EQ(cublasLtMatmulDescSetAttribute(out.operation, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, call.op_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, call.op_b);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, call.epilogue);
    const void* const bias = bias_.as<char>() + call.bias_offset;
    void* const aux = aux_.as<char>() + call.aux_offset;
    if (call.has_bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (call.has_aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, call.bias_type);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, call.aux_type);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, call.aux_ld);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, call.aux_stride);
    out.a = lay_out(call.a, call.batch), out.b = lay_out(call.b, call.batch);
    out.c = lay_out(call.c, call.batch), out.d = lay_out(call.d, call.batch);
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&out.preference), CUBLAS_STATUS_SUCCESS);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(out.preference, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{call.planned_workspace});
    for (auto which :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(which, call.alignment);
    return out;
  }
  static cublasLtMatrixLayout_t lay_out(const Matrix& m, int32_t batch) {
    cublasLtMatrixLayout_t out = nullptr;
    EXPECT_EQ(cublasLtMatrixLayoutCreate(&out, m.type, static_cast<uint64_t>(m.rows),
                                         static_cast<uint64_t>(m.columns), m.ld),
              CUBLAS_STATUS_SUCCESS);
    auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
      EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(out, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    };
    set(CUBLASLT_MATRIX_LAYOUT_ORDER, m.order);
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.stride);
    return out;
  }
  static void destroy(const Descriptors& d) {
    cublasLtMatmulDescDestroy(d.operation);
    for (cublasLtMatrixLayout_t layout : {d.a, d.b, d.c, d.d}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(d.preference);
  }

  Device device_;
  cublasHandle_t handle_ = nullptr;
};

// Returns whether the table in section cublasLtMatmul() lists these types in its rows for FP32 and BF16.
bool is_documented(cublasComputeType_t compute, cudaDataType scale, cudaDataType a, cudaDataType b,
                   cudaDataType d) {
  if (scale != CUDA_R_32F || a != b) return false;
  if (compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC)
    return (a == CUDA_R_16BF && (d == CUDA_R_16BF || d == CUDA_R_32F)) ||
           (a == CUDA_R_32F && d == CUDA_R_32F);
  if (compute == CUBLAS_COMPUTE_32F_FAST_TF32 || compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
      compute == CUBLAS_COMPUTE_32F_FAST_16F)
    return a == CUDA_R_32F && d == CUDA_R_32F;
  return false;
}

TEST_F(CublasRules, TypesAreThoseOfTheDocumentedTable) {
  int accepted = 0;
  for (cublasComputeType_t compute :
       {CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_COMPUTE_32F_FAST_TF32,
        CUBLAS_COMPUTE_32F_FAST_16BF, CUBLAS_COMPUTE_32F_FAST_16F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32I}) {
    for (cudaDataType scale : {CUDA_R_32F, CUDA_R_16BF, CUDA_R_64F}) {
      for (cudaDataType a : {CUDA_R_16BF, CUDA_R_32F}) {
        for (cudaDataType b : {CUDA_R_16BF, CUDA_R_32F}) {
          for (cudaDataType d : {CUDA_R_16BF, CUDA_R_32F}) {
            Call call = Call::plain();
            call.compute = compute, call.scale = scale;
            call.a.type = a, call.b.type = b, call.c.type = call.d.type = d;
            const bool documented = is_documented(compute, scale, a, b, d);
            EXPECT_EQ(result(call), documented ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED)
                << "compute " << compute << " scale " << scale << " types " << a << b << d;
            accepted += documented ? 1 : 0;
          }
        }
      }
    }
  }
  EXPECT_EQ(accepted, 9);
}

TEST_F(CublasRules, EveryEpilogueTakesEveryRowOfTypes) {
  struct Form {
    uint32_t epilogue;
    bool bias, aux;
  };
  for (Form form :
       {Form{CUBLASLT_EPILOGUE_DEFAULT, false, false}, Form{CUBLASLT_EPILOGUE_BIAS, true, false},
        Form{CUBLASLT_EPILOGUE_GELU, false, false}, Form{CUBLASLT_EPILOGUE_GELU_BIAS, true, false},
        Form{CUBLASLT_EPILOGUE_GELU_AUX, false, true}, Form{CUBLASLT_EPILOGUE_GELU_AUX_BIAS, true, true},
        Form{CUBLASLT_EPILOGUE_DGELU, false, true}}) {
    for (auto [ab, d] :
         {std::pair{CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F}, {CUDA_R_32F, CUDA_R_32F}}) {
      Call call;
      call.set_types(ab, d);
      call.epilogue = form.epilogue, call.has_bias = form.bias, call.has_aux = form.aux;
      EXPECT_EQ(result(call), CUBLAS_STATUS_SUCCESS) << form.epilogue;
      // Omits a pointer that the epilogue needs, or passes a pointer that the epilogue does not use.
      call.has_bias = !form.bias;
      EXPECT_EQ(result(call), CUBLAS_STATUS_INVALID_VALUE) << form.epilogue;
      call.has_bias = form.bias, call.has_aux = !form.aux;
      EXPECT_EQ(result(call), CUBLAS_STATUS_INVALID_VALUE) << form.epilogue;
    }
  }
}

TEST_F(CublasRules, TheBiasIsOfDsType) {
  EXPECT_EQ(result(Call{}, [](Call& c) { c.bias_type = CUDA_R_16BF; }), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.bias_type = CUDA_R_32F; }), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasRules, AuxIsOfDsType) {
  EXPECT_EQ(result(Call{}, [](Call& c) { c.aux_type = CUDA_R_16BF; }), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.aux_type = CUDA_R_32F; }), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasRules, AuxsLeadingDimensionIsAMultipleOf8AndAtLeastDsRows) {
  for (int64_t ld = 0; ld <= kRows + 16; ++ld) {
    EXPECT_EQ(result(Call{}, [&](Call& c) { c.aux_ld = ld; }),
              ld % 8 == 0 && ld >= kRows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE)
        << ld;
  }
}

TEST_F(CublasRules, AuxOfABatchHasAStride) {
  EXPECT_EQ(result(Call::several(), [](Call& c) { c.aux_stride = 0; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call::several(), [](Call& c) { c.aux_stride += 4; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call::several(), [](Call& c) { c.aux_stride += 8; }), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasRules, EpiloguesNeedAColumnMajorD) {
  auto by_row = [](Call& c) {
    c.c.order = c.d.order = CUBLASLT_ORDER_ROW;
    c.c.ld = c.d.ld = kColumns;
  };
  EXPECT_EQ(result(Call::plain(), by_row), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(result(Call{}, by_row), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST_F(CublasRules, OperandsMayBeRowMajorButNotTiled) {
  auto in_order = [](int32_t order, int64_t ld) {
    return [order, ld](Call& c) { c.a.order = order, c.a.ld = ld; };
  };
  EXPECT_EQ(result(Call{}, in_order(CUBLASLT_ORDER_ROW, kInner)), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(result(Call{}, in_order(CUBLASLT_ORDER_ROW, kInner - 1)), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, in_order(CUBLASLT_ORDER_COL32, 32 * kRows)), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasRules, LeadingDimensionsHoldAColumn) {
  EXPECT_EQ(result(Call{}, [](Call& c) { c.a.ld = kRows - 1; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.b.ld = kInner - 1; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.c.ld = c.d.ld = kRows - 1; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.a.ld = kRows + 3; }), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasRules, SizesFitTogether) {
  EXPECT_EQ(result(Call{}, [](Call& c) { c.a.columns = kInner - 1; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.op_a = CUBLAS_OP_T; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.a.columns = c.b.rows = 0; }), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasRules, InPlaceProductsHaveOneLayout) {
  EXPECT_EQ(result(Call{}, [](Call& c) { c.c.ld += 8; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.c.type = CUDA_R_32F; }), CUBLAS_STATUS_INVALID_VALUE);
}

// Finds overlapping outputs of a batch by counting the writes to each element.
TEST_F(CublasRules, OutputsOfABatchDoNotOverlap) {
  for (int64_t ld : {kRows, kRows + 8, 3 * kRows}) {
    for (int64_t stride = 0; stride <= 3 * kRows + 8; stride += 4) {
      Call call = Call::plain();
      call.batch = kBatch;
      call.c.columns = call.d.columns = call.b.columns = 2;
      call.c.ld = call.d.ld = ld, call.c.stride = call.d.stride = stride;
      call.alignment = 8;
      std::vector<int> written(kBatch * stride + 2 * ld + kRows);
      for (int64_t product = 0; product < kBatch; ++product) {
        for (int64_t column = 0; column < 2; ++column) {
          for (int64_t row = 0; row < kRows; ++row) ++written[product * stride + column * ld + row];
        }
      }
      const bool overlap = std::ranges::any_of(written, [](int times) { return times > 1; });
      EXPECT_EQ(result(call), overlap ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS)
          << "ld " << ld << " stride " << stride;
    }
  }
}

TEST_F(CublasRules, AlgorithmsNeedTheAlignmentThatTheyWereFoundFor) {
  Call call;
  call.alignment = 16;
  for (int64_t offset : {2, 8, 16, 32}) {
    const cublasStatus_t expected = offset % 16 == 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    EXPECT_EQ(result_after_planning(call, [&](Call& c) { c.a.offset = offset; }), expected) << offset;
    EXPECT_EQ(result_after_planning(call, [&](Call& c) { c.b.offset = offset; }), expected) << offset;
    EXPECT_EQ(result_after_planning(call, [&](Call& c) { c.d.offset = offset; }), expected) << offset;
  }
}

TEST_F(CublasRules, EachMatrixOfABatchIsAligned) {
  Call call = Call::several();
  call.alignment = 16;
  EXPECT_EQ(result(call), CUBLAS_STATUS_SUCCESS);
  call.a.stride += 4;
  EXPECT_EQ(result(call), CUBLAS_STATUS_INVALID_VALUE);
  call.alignment = 8;
  EXPECT_EQ(result(call), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasRules, BiasAndAuxAreAsAlignedAsWhenTheAlgorithmWasFound) {
  EXPECT_EQ(result_after_planning(Call{}, [](Call& c) { c.bias_offset = 16; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result_after_planning(Call{}, [](Call& c) { c.aux_offset = 16; }), CUBLAS_STATUS_INVALID_VALUE);
  Call unaligned;
  unaligned.bias_offset = unaligned.aux_offset = 16;
  EXPECT_EQ(result_after_planning(unaligned, [](Call& c) { c.bias_offset = 48; }), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasRules, TheWorkspaceIsAlignedAndAsLargeAsPromised) {
  EXPECT_EQ(result(Call{}, [](Call& c) { c.workspace_offset = 128; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.workspace_offset = 256; }), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.workspace = kWorkspace - 1; }), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result(Call{}, [](Call& c) { c.workspace = c.planned_workspace = 0; }), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasRules, AlgorithmsAreForTheirTypesOrdersAndEpilogue) {
  EXPECT_EQ(result_after_planning(Call{}, [](Call& c) { c.set_types(CUDA_R_32F, CUDA_R_32F); }),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result_after_planning(Call{}, [](Call& c) { c.a.order = CUBLASLT_ORDER_ROW; }),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(result_after_planning(
                Call{}, [](Call& c) { c.epilogue = CUBLASLT_EPILOGUE_GELU_BIAS, c.has_aux = false; }),
            CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasRules, EpiloguesThatAreNotModelledAreRefused) {
  for (uint32_t epilogue : {uint32_t{CUBLASLT_EPILOGUE_RELU}, uint32_t{CUBLASLT_EPILOGUE_DGELU_BGRAD},
                            uint32_t{CUBLASLT_EPILOGUE_BGRADB}, 0u, 1u << 20})
    EXPECT_EQ(result(Call{}, [&](Call& c) { c.epilogue = epilogue; }), CUBLAS_STATUS_NOT_SUPPORTED)
        << epilogue;
}

// Tests refuse_biases() and refuse_gelu_epilogues(), which tests/kernels/gemm_test.cpp uses in simt_tests.
TEST_F(CublasRules, TestsCanRefuseBiasesAndGelu) {
  simt::refuse_biases(true);
  EXPECT_EQ(result(Call{}), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(result(Call::plain()), CUBLAS_STATUS_SUCCESS);
  simt::refuse_biases(false);
  simt::refuse_gelu_epilogues(true);
  EXPECT_EQ(result(Call{}), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(result(Call::plain()), CUBLAS_STATUS_SUCCESS);
  simt::refuse_gelu_epilogues(false);
  EXPECT_EQ(result(Call{}), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasRules, OperandsInPageableHostMemoryEndTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child would not have the stand-in's threads
  const Buffer pinned = Buffer::pinned(Device::cuda(0), kRows * kInner * sizeof(float));
  std::fill_n(pinned.as<float>(), kRows * kInner, 0.0f);
  const std::vector<float> host(kRows * kInner);
  auto multiply = [&](const float* a) {
    Gemm g{.m = kRows, .n = kRows, .k = kInner};
    g.a = a, g.b = b_.as<float>(), g.c = d_.as<float>();
    g.lda = kInner, g.ldb = g.ldc = kRows;
    gemm(stream_, g);
    stream_.synchronize();
  };
  multiply(a_.as<float>());
  multiply(pinned.as<float>());
  EXPECT_DEATH(multiply(host.data()), "cublasLtMatmul got .* an address of pageable host memory");
}

// Stores a row-major A with the elements of a column-major matrix's transpose.
TEST_F(CublasRules, RowMajorOperandsGiveTheSameProduct) {
  std::vector<float> a(kRows * kInner), b(kInner * kColumns);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 13) - 6.0f;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 7) - 3.0f;
  copy(stream_, a_.data(), a.data(), a.size() * sizeof(float));
  copy(stream_, b_.data(), b.data(), b.size() * sizeof(float));
  Call call = Call::plain();
  call.set_types(CUDA_R_32F, CUDA_R_32F);
  std::array<std::vector<float>, 2> results;
  for (bool by_row : {false, true}) {
    call.a = {CUDA_R_32F,
              by_row ? kRows : kInner,
              by_row ? kInner : kRows,
              kInner,
              0,
              by_row ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL};
    call.op_a = by_row ? CUBLAS_OP_N : CUBLAS_OP_T;
    ASSERT_EQ(result(call), CUBLAS_STATUS_SUCCESS);
    results[by_row].resize(kRows * kColumns);
    copy(stream_, results[by_row].data(), d_.data(), results[by_row].size() * sizeof(float));
    stream_.synchronize();
  }
  EXPECT_EQ(results[0], results[1]);
  float expected = 0.0f;  // the element in row 1, column 2
  for (int64_t k = 0; k < kInner; ++k) expected += a[kInner + k] * b[2 * kInner + k];
  EXPECT_EQ(results[1][2 * kRows + 1], expected);
}

}  // namespace
}  // namespace gradwire
