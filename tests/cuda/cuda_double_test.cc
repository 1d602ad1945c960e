// The double refuses what the real libraries document as refused, where the back end's other tests
// would not come to it.
#include "tests/cuda_double/cuda_double.h"

#include <gtest/gtest.h>

#include "graph/cuda_handle.h"

// As ops/launch.cuh declares it.
cudaError_t trainrt_double_launch(cudaStream_t stream, int64_t n, std::function<void()> work);

namespace trainrt {
namespace {

class CudaDoubleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda_double::reset();
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    for (cuda::Stream* stream : {&stream_, &other_}) {
      ASSERT_EQ(cudaStreamCreateWithFlags(stream->put(), cudaStreamNonBlocking), cudaSuccess);
    }
    ASSERT_EQ(cudaEventCreateWithFlags(event_.put(), cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMalloc(memory_.put(), 8), cudaSuccess);
  }

  // Captures a memset and what `more` asks for.
  template <typename Fn>
  cudaError_t capture(Fn&& more) {
    EXPECT_EQ(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(memory_.get(), 1, 8, stream_.get()), cudaSuccess);
    more();
    cuda::Owned<cudaGraph_t, cudaGraphDestroy> none;
    graph_ = std::move(none);
    return cudaStreamEndCapture(stream_.get(), graph_.put());
  }

  cuda::Stream stream_, other_;
  cuda::Event event_;
  cuda::Memory memory_;
  cuda::Owned<cudaGraph_t, cudaGraphDestroy> graph_;
};

TEST_F(CudaDoubleTest, ACapturedGraphRunsWhenItIsLaunchedAndAsOftenAsThat) {
  ASSERT_EQ(capture([] {}), cudaSuccess);
  cuda::Owned<cudaGraphExec_t, cudaGraphExecDestroy> exec;
  ASSERT_EQ(cudaGraphInstantiate(exec.put(), graph_.get(), 0), cudaSuccess);
  cuda::PinnedMemory host;
  ASSERT_EQ(cudaHostAlloc(host.put(), 8, cudaHostAllocDefault), cudaSuccess);
  const auto first_byte = [&] {
    EXPECT_EQ(cudaMemcpyAsync(host.get(), memory_.get(), 8, cudaMemcpyDefault, stream_.get()),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
    return *static_cast<const unsigned char*>(host.get());
  };
  EXPECT_EQ(first_byte(), 0xff);  // captured, not done
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(cudaMemsetAsync(memory_.get(), 7, 8, stream_.get()), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec.get(), stream_.get()), cudaSuccess);
    EXPECT_EQ(first_byte(), 1);
  }
}

TEST_F(CudaDoubleTest, WhatWaitsOrAllocatesBreaksACapture) {
  EXPECT_EQ(capture([&] {
              EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaErrorStreamCaptureUnsupported);
            }),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(
      capture([&] { EXPECT_EQ(cudaEventQuery(event_.get()), cudaErrorStreamCaptureUnsupported); }),
      cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(capture([&] {
              cuda::Memory more;
              EXPECT_EQ(cudaMalloc(more.put(), 8), cudaErrorStreamCaptureUnsupported);
            }),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(capture([&] {
              EXPECT_EQ(cudaEventRecord(event_.get(), other_.get()), cudaSuccess);
              EXPECT_EQ(cudaStreamWaitEvent(stream_.get(), event_.get(), 0),
                        cudaErrorStreamCaptureIsolation);
            }),
            cudaSuccess);
  EXPECT_EQ(capture([&] {
              const double word = 1;
              EXPECT_EQ(
                  cudaMemcpyAsync(memory_.get(), &word, 8, cudaMemcpyHostToDevice, stream_.get()),
                  cudaErrorStreamCaptureUnsupported);
            }),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamEndCapture(stream_.get(), graph_.put()), cudaErrorIllegalState);
}

TEST_F(CudaDoubleTest, ACaptureLoadsNoKernel) {
  const auto launch = [&] { return trainrt_double_launch(stream_.get(), 1, [] {}); };
  EXPECT_EQ(launch(), cudaSuccess);
  EXPECT_EQ(capture([&] { EXPECT_EQ(launch(), cudaSuccess); }), cudaSuccess);
  EXPECT_EQ(capture([&] {
              EXPECT_EQ(trainrt_double_launch(stream_.get(), 1, [] {}),  // another kernel
                        cudaErrorStreamCaptureUnsupported);
            }),
            cudaErrorStreamCaptureInvalidated);
}

TEST_F(CudaDoubleTest, AKernelsStreamIsOfTheThreadsDevice) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event_.get(), stream_.get()), cudaSuccess);
  cuda::Event elsewhere;
  ASSERT_EQ(cudaEventCreateWithFlags(elsewhere.put(), cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(elsewhere.get(), stream_.get()), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

}  // namespace
}  // namespace trainrt
