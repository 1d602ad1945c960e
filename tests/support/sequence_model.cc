#include "tests/support/sequence_model.h"

#include <cstdlib>
#include <sstream>

#include "graph/base/error.h"

namespace trainrt::testing {

namespace {

// Numbers in [-0.5, 0.5) without a pattern.
std::string weights(const std::string& name, int rows, int columns, unsigned seed) {
  std::ostringstream text;
  text << "float[" << rows << ", " << columns << "] " << name << " = {";
  for (int i = 0; i < rows * columns; ++i) {
    seed = seed * 1664525u + 1013904223u;
    text << (i == 0 ? "" : ", ") << static_cast<double>(seed >> 8) / (1 << 24) - 0.5;
  }
  return text.str() + "}";
}

}  // namespace

std::string sequence_model() {
  return "<ir_version: 8, opset_import: [\"\" : 17]>\n"
         "sequence (int64[N, S] tokens) => (float[N, S, 11] logits)\n"
         "<" +
         weights("wte", 11, 8, 1) + ",\n" + weights("wpe", kSequenceWidth, 8, 2) + ",\n" +
         weights("wq", 8, 8, 3) + ",\n" + weights("wk", 8, 8, 4) + ",\n" + weights("wv", 8, 8, 5) +
         ",\n" + weights("wo", 8, 11, 6) +
         ",\n"
         "int64 zero = {0}, int64 one = {1}, int64[1] rows = {1}, int64[1] columns = {0},\n"
         "float hidden = {-1e9}>\n"
         "{\n"
         "  shape = Shape(tokens)\n"
         "  length = Gather(shape, one)\n"
         "  positions = Range(zero, length, one)\n"
         "  places = Gather(wpe, positions)\n"
         "  words = Gather(wte, tokens)\n"
         "  x = Add(words, places)\n"
         "  q = MatMul(x, wq)\n"
         "  k = MatMul(x, wk)\n"
         "  v = MatMul(x, wv)\n"
         "  kt = Transpose<perm = [0, 2, 1]>(k)\n"
         "  scores = MatMul(q, kt)\n"
         "  query = Unsqueeze(positions, rows)\n"
         "  key = Unsqueeze(positions, columns)\n"
         "  seen = GreaterOrEqual(query, key)\n"
         "  masked = Where(seen, scores, hidden)\n"
         "  parts = Softmax<axis = -1>(masked)\n"
         "  y = MatMul(parts, v)\n"
         "  h = Add(x, y)\n"
         "  logits = MatMul(h, wo)\n"
         "}\n";
}

void write_sequences(const std::string& path, int num_samples) {
  const std::string n = std::to_string(num_samples), width = std::to_string(kSequenceWidth);
  const std::string code =
      "import numpy as np\n"
      "r = np.random.RandomState(5)\n"
      "lengths = np.clip(r.geometric(0.25, " +
      n + "), 2, " + width +
      ")\n"
      "lengths[3] = " +
      width +
      "\n"
      "tokens = r.randint(0, 11, (" +
      n + ", " + width +
      "))\n"
      "labels = np.full((" +
      n + ", " + width +
      "), -100)\n"
      "mask = np.zeros((" +
      n + ", " + width +
      "), dtype='i8')\n"
      "for i, l in enumerate(lengths):\n"
      "  labels[i, :l - 1] = tokens[i, 1:l]\n"
      "  mask[i, :l] = 1\n"
      "np.savez('" +
      path + "', tokens=tokens, labels=labels, attention_mask=mask, lengths=lengths)";
  TRAINRT_CHECK(std::system(("/usr/bin/python3 -c \"" + code + "\"").c_str()) == 0);
}

}  // namespace trainrt::testing
