#include "runtime/version.h"

namespace trainrt {

std::string version() {
  return TRAINRT_VERSION;
}

}  // namespace trainrt
