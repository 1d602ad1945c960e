# trainrt_embed(FOLDER FUNCTION FILE): builds FILE into the library FOLDER as the text that
# trainrt::FUNCTION() returns (declared in FOLDER/embedded_data.h).
function(trainrt_embed folder function file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${file})
  file(READ ${CMAKE_SOURCE_DIR}/${file} text)
  set(output ${CMAKE_BINARY_DIR}/embedded/${function}.cc)
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [=[
#include "@folder@/embedded_data.h"

namespace trainrt {

std::string_view @function@() {
  static constexpr char kText[] = R"EMBED(@text@)EMBED";
  return {kText, sizeof(kText) - 1};
}

}  // namespace trainrt
]=])
  target_sources(${folder} PRIVATE ${output})
endfunction()

# trainrt_embed_headers(FUNCTION FILE...): writes embedded/FUNCTION.cc with the text of each FILE and
# of what it includes of its folder, as trainrt::FUNCTION() returns it (ops/device_headers.cuh).
function(trainrt_embed_headers function)
  set(waiting ${ARGN})
  set(known)
  set(entries "")
  while(waiting)
    list(POP_FRONT waiting file)
    if(file IN_LIST known)
      continue()
    endif()
    list(APPEND known ${file})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${file})
    file(READ ${CMAKE_SOURCE_DIR}/${file} text)
    string(APPEND entries "      {\"${file}\", R\"EMBED(${text})EMBED\"},\n")
    get_filename_component(folder ${file} DIRECTORY)
    string(REGEX MATCHALL "#include \"${folder}/[a-z_.]+\"" includes "${text}")
    foreach(include ${includes})
      string(REGEX REPLACE "#include \"(.*)\"" "\\1" include ${include})
      list(APPEND waiting ${include})
    endforeach()
  endwhile()
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/embedded/${function}.cc @ONLY CONTENT [=[
#include "ops/device_headers.cuh"

namespace trainrt {

std::span<const DeviceHeader> @function@() {
  static constexpr DeviceHeader kHeaders[] = {
@entries@  };
  return kHeaders;
}

}  // namespace trainrt
]=])
endfunction()
