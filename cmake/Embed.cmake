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
