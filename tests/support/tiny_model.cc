#include "tests/support/tiny_model.h"

#include <sstream>

namespace trainrt::testing {

namespace {

// Numbers in [-0.5, 0.5) without a pattern.
std::string numbers(int count, unsigned seed) {
  std::ostringstream text;
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    text << (i == 0 ? "" : ", ") << static_cast<double>(seed >> 8) / (1 << 24) - 0.5;
  }
  return text.str();
}

}  // namespace

std::string tiny_model() {
  return "<ir_version: 8, opset_import: [\"\" : 17]>\n"
         "tiny (float[N, 4] x) => (float[N, 3] y)\n"
         "<float[4, 8] w1 = {" +
         numbers(32, 1) + "}, float[8] b1 = {" + numbers(8, 2) + "},\n float[8, 3] w2 = {" +
         numbers(24, 3) + "}, float[3] b2 = {" + numbers(3, 4) +
         "}>\n"
         "{\n"
         "  h1 = MatMul(x, w1)\n"
         "  h2 = Add(h1, b1)\n"
         "  h3 = Tanh(h2)\n"
         "  h4 = MatMul(h3, w2)\n"
         "  y = Add(h4, b2)\n"
         "}\n";
}

}  // namespace trainrt::testing
