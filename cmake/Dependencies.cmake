# Third parties: from the system, and from the cache that scripts/deps fills.
if(DEFINED ENV{TRAINRT_CACHE})
  set(default_cache $ENV{TRAINRT_CACHE})
else()
  set(default_cache $ENV{HOME}/.cache/trainrt)
endif()
set(TRAINRT_CACHE ${default_cache} CACHE PATH "Third parties built or unpacked by scripts/deps")
file(STRINGS ${CMAKE_SOURCE_DIR}/cmake/versions.txt versions REGEX "^[A-Z_]+=")
foreach(line ${versions})
  string(REGEX MATCH "^([A-Z_]+)=(.*)" line "${line}")
  set(${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cmake/versions.txt)
set(onnx_dir ${TRAINRT_CACHE}/onnx-${ONNX_VERSION}-${ONNX_REVISION})
set(onednn_dir ${TRAINRT_CACHE}/onednn-${ONEDNN_VERSION})
foreach(dir ${onnx_dir} ${onednn_dir})
  if(NOT IS_DIRECTORY ${dir})
    message(FATAL_ERROR "${dir} is missing: run scripts/deps, or set TRAINRT_CACHE")
  endif()
endforeach()

find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(Eigen3 REQUIRED NO_MODULE)
find_package(Gloo REQUIRED)
find_package(ZLIB REQUIRED)

# Whole, because its operator schemas register themselves from static initializers.
find_package(Protobuf REQUIRED)
find_package(ONNX CONFIG REQUIRED PATHS ${onnx_dir} NO_DEFAULT_PATH)
add_library(trainrt_onnx INTERFACE)
target_link_libraries(trainrt_onnx INTERFACE $<LINK_LIBRARY:WHOLE_ARCHIVE,ONNX::onnx>)

# The packaged CMake file of oneDNN asks for SYCL, which this build of it does not use.
add_library(oneDNN::dnnl SHARED IMPORTED)
set_target_properties(oneDNN::dnnl PROPERTIES
  IMPORTED_LOCATION ${onednn_dir}/lib/libdnnl.so.3
  INTERFACE_INCLUDE_DIRECTORIES ${onednn_dir}/include)

# OpenMP for setting oneDNN's threads. Under TSan its pragmas are left unread, since every parallel
# loop of libgomp is reported as a race; the library is still there for omp_set_num_threads.
add_library(trainrt_openmp INTERFACE)
if(TRAINRT_SANITIZE STREQUAL "thread")
  target_link_libraries(trainrt_openmp INTERFACE ${OpenMP_gomp_LIBRARY})
  target_compile_options(trainrt_openmp INTERFACE -Wno-unknown-pragmas)
else()
  target_link_libraries(trainrt_openmp INTERFACE OpenMP::OpenMP_CXX)
endif()
