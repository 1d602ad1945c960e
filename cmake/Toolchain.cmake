# Compiler, flags, linker and compiler cache.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# CUDA's module and gtest's discovery need nothing of C++20 modules; scanning for them costs a
# process per source.
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# No debug information: it doubles compile time and object size. Use RelWithDebInfo when debugging.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g0 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g -DNDEBUG")

# Both -fno- flags change no result: they drop errno and floating-point exception flags, which
# nobody reads and which keep loops scalar. -ffast-math would change results.
set(cxx_options -march=${TRAINRT_MARCH} -fno-math-errno -fno-trapping-math -fopenmp-simd
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor)
if(TRAINRT_WERROR)
  list(APPEND cxx_options -Werror)
endif()

if(TRAINRT_SANITIZE STREQUAL "address")
  list(APPEND cxx_options -fsanitize=address,undefined -fno-sanitize-recover=all)
  add_link_options(-fsanitize=address,undefined)
elseif(TRAINRT_SANITIZE STREQUAL "thread")
  list(APPEND cxx_options -fsanitize=thread)
  add_link_options(-fsanitize=thread)
  # oneDNN and libgomp synchronise in ways that TSan does not see; the reference kernels use neither.
  set(TRAINRT_REFERENCE_KERNELS ON)
elseif(TRAINRT_SANITIZE)
  message(FATAL_ERROR "TRAINRT_SANITIZE is '${TRAINRT_SANITIZE}'; it may be 'address' or 'thread'")
endif()
if(TRAINRT_SANITIZE)
  list(APPEND cxx_options -O1 -g1 -fno-omit-frame-pointer -UNDEBUG -D_GLIBCXX_ASSERTIONS)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 takes the checks it adds to std::function for reads of uninitialized memory.
    list(APPEND cxx_options -Wno-maybe-uninitialized)
  endif()
endif()
if(TRAINRT_FUZZ)
  # Clang warns of every `omp simd` loop that its sanitized -O1 leaves scalar.
  list(APPEND cxx_options -fsanitize=fuzzer-no-link -Wno-pass-failed)
endif()
if(TRAINRT_REFERENCE_KERNELS)
  list(APPEND cxx_options -DTRAINRT_REFERENCE_KERNELS=1)
endif()
# File names in messages start at the repository's root, and equal sources compile to equal objects
# in every checkout, which lets checkouts share one compiler cache (ccache makes paths relative).
list(APPEND cxx_options -ffile-prefix-map=${CMAKE_SOURCE_DIR}/= -ffile-prefix-map=../=)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${cxx_options}>")

find_program(MOLD mold)
if(MOLD)
  add_link_options(-fuse-ld=mold)
endif()

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
    CCACHE_NOHASHDIR=1 ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
