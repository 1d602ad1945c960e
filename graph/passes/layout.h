// Layout of images: [n, c, spatial...], as ONNX has it, or channels last, [n, spatial..., c].
//
// Convolutions are as fast channels-last as in any blocked layout and take such tensors as they
// are, where plain ONNX order costs two copies around every one of them. So the forward graph turns
// an image once, before the first convolution, and keeps it turned through everything that knows
// how to follow; the rest gets it turned back. An operator's own file says what it does
// (RegisterImageRule); operators without a rule see only ONNX order.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

enum class ImageForm : uint8_t {
  kLayout,       // listed inputs and output 0 are images, told by the attribute `layout`
  kElementwise,  // inputs broadcast to output 0; no attribute names a dim
  kAxis,         // attribute `axis` names a dim of every input and of output 0
  kAxes,         // attribute `axes` names dims of input 0 that are reduced; `keepdims`
};

struct ImageRule {
  ImageForm form = ImageForm::kElementwise;
  std::vector<int> images = {};  // kLayout: the inputs
  // Turns its images even if none is turned yet. The others follow.
  bool leads = false;
};

struct RegisterImageRule {
  RegisterImageRule(const std::string& op_type, ImageRule rule);
};

// The rule of an operator, null when it has none.
const ImageRule* find_image_rule(const std::string& op_type);

// The same function with images channels-last where rules allow. Inputs, parameters, outputs, state
// and node names stay; a turned value is called "<name>/nhwc", and "<name>" exists only if somebody
// reads it in ONNX order.
Graph turn_images(const Graph& graph);

}  // namespace trainrt
