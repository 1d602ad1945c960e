// DepthToSpace and SpaceToDepth: a transposition between two reshapes.
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

struct Image {
  int64_t n, c, h, w, block;
};

Image image_of(UpgradeContext& context) {
  const Shape shape = context.shape(context.input(0));
  TRAINRT_REQUIRE(shape.size() == 4,
                  kInvalidModel,
                  "the input is ",
                  shape_string(shape),
                  ", wanted [N, C, H, W]");
  const Image image{
      shape[0], shape[1], shape[2], shape[3], context.attributes().get_int("blocksize")};
  TRAINRT_REQUIRE(
      image.block >= 1, kInvalidModel, "blocksize is ", image.block, "; wanted at least 1");
  return image;
}

void upgrade_depth_to_space(UpgradeContext& context) {
  const auto [n, c, h, w, b] = image_of(context);
  TRAINRT_REQUIRE(c % b == 0 && c / b % b == 0,
                  kInvalidModel,
                  c,
                  " channels do not divide into blocks of ",
                  b,
                  " x ",
                  b);
  const int64_t depth = c / b / b;
  const bool column_row = context.attributes().get_string("mode", "DCR") == "CRD";
  const Shape split = column_row ? Shape{n, depth, b, b, h, w} : Shape{n, b, b, depth, h, w};
  const std::vector<int64_t> perm =
      column_row ? std::vector<int64_t>{0, 1, 4, 2, 5, 3} : std::vector<int64_t>{0, 3, 4, 1, 5, 2};
  const ValueId moved = context.transpose(context.reshape(context.input(0), split), perm);
  context.set_outputs(context.emit("Reshape", {moved}, {{"shape", Shape{n, depth, h * b, w * b}}}));
}

void upgrade_space_to_depth(UpgradeContext& context) {
  const auto [n, c, h, w, b] = image_of(context);
  TRAINRT_REQUIRE(h % b == 0 && w % b == 0,
                  kInvalidModel,
                  "images of ",
                  h,
                  " x ",
                  w,
                  " do not divide into blocks of ",
                  b,
                  " x ",
                  b);
  const ValueId split = context.reshape(context.input(0), {n, c, h / b, b, w / b, b});
  const ValueId moved = context.transpose(split, {0, 3, 5, 1, 2, 4});
  context.set_outputs(
      context.emit("Reshape", {moved}, {{"shape", Shape{n, c * b * b, h / b, w / b}}}));
}

const RegisterUpgrade kDepthToSpace{"DepthToSpace", upgrade_depth_to_space};
const RegisterUpgrade kSpaceToDepth{"SpaceToDepth", upgrade_space_to_depth};

}  // namespace

}  // namespace trainrt
