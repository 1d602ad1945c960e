# trainrt_cuda: the CUDA sources of three folders as one module, which the program opens only where
# a driver is present. It holds kernels and handles; the registry it fills is the program's.
file(GLOB trainrt_cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ops/*.cu
  ${CMAKE_SOURCE_DIR}/runtime/cuda_*.cc ${CMAKE_SOURCE_DIR}/parallel/nccl_*.cc)
trainrt_embed_headers(device_headers ops/device_std.cuh ops/fused_kernel.cuh ops/functors.h)
list(APPEND trainrt_cuda_sources ${CMAKE_BINARY_DIR}/embedded/device_headers.cc)
if(TRAINRT_CUDA STREQUAL "OFF" OR NOT trainrt_cuda_sources)
  return()
endif()

find_package(CUDAToolkit 12.8 QUIET)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
  if(TRAINRT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TRAINRT_CUDA=ON, but no CUDA toolkit 12.8 or newer was found")
  endif()
  message(STATUS "CUDA: no toolkit 12.8 or newer found, trainrt_cuda is not built")
  return()
endif()
# cuDNN and NCCL come beside the toolkit or from the system.
find_library(CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR})
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
foreach(path CUDNN_LIBRARY CUDNN_INCLUDE_DIR NCCL_LIBRARY NCCL_INCLUDE_DIR)
  if(NOT ${path})
    if(TRAINRT_CUDA STREQUAL "ON")
      message(FATAL_ERROR "TRAINRT_CUDA=ON, but ${path} was not found")
    endif()
    message(STATUS "CUDA: ${path} not found, trainrt_cuda is not built")
    return()
  endif()
endforeach()

# Named, since `native` fails on a build machine without a GPU.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80;90;100" CACHE STRING "GPU architectures")
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

add_library(trainrt_cuda MODULE ${trainrt_cuda_sources})
set_target_properties(trainrt_cuda PROPERTIES PREFIX "" LINKER_LANGUAGE CXX)
target_compile_options(trainrt_cuda PRIVATE
  # 186: a functor that serves signed and unsigned integers compares the latter with zero, too.
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--diag-suppress=186;-Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas>"
  "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${TRAINRT_WERROR}>>:-Werror=all-warnings>")
target_include_directories(trainrt_cuda SYSTEM PRIVATE ${CUDNN_INCLUDE_DIR} ${NCCL_INCLUDE_DIR})
# The driver library (libcuda) is left out: linked, it would keep the module from loading without a
# driver, and then there is no clean message.
target_link_libraries(trainrt_cuda PRIVATE CUDA::cudart CUDA::cublasLt
  CUDA::nvrtc ${CUDNN_LIBRARY} ${NCCL_LIBRARY})
