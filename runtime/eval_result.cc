#include "runtime/eval_result.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace trainrt {

std::string eval_result(const StepResult& sum, bool json) {
  const double accuracy = sum.item_count > 0 ? sum.correct / sum.item_count : 0;
  if (json) {
    nlohmann::ordered_json result = {{"loss", sum.loss()}, {"items", sum.item_count}};
    if (sum.has_correct) {
      result["accuracy"] = accuracy;
    }
    return result.dump(2) + "\n";
  }
  char text[96];
  std::snprintf(text, sizeof(text), "loss: %.6g\n", sum.loss());
  std::string result = text;
  if (sum.has_correct) {
    std::snprintf(text, sizeof(text), "accuracy: %.4f\n", accuracy);
    result += text;
  }
  return result;
}

}  // namespace trainrt
