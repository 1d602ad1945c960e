// Gradients summed in an order that belongs to the batch and not to the ranks (--reduction exact).
//
// The samples of a step form logical shards. A shard's micro-batches are added in order; shards are
// summed in an aligned binary tree, whose inner nodes are sums of two neighbours. AccumulateTree
// keeps a rank's open subtrees on a stack of slots, as a binary counter keeps its digits; TreeSum
// goes on from the subtrees of all ranks, in order, to the root. Which slot a micro-batch adds to,
// and how often the two top slots merge afterwards, are attributes: parallel/reduction_tree.
//
//   AccumulateTree(slots [n, ...], term [...], micro_batch) -> slots, in place
//       slot[i], first[i], merges[i] for micro-batch i
//   TreeSum(subtrees [n, ...]) -> [...]
//       merges[j] after subtree j; subtrees past the end of `merges` are not read
#include <algorithm>
#include <array>

#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 16384;
constexpr int64_t kBlock = 512;  // elements of a stack of partial sums
constexpr size_t kMaxDepth = 40;

TensorType element_of_stack(const OpContext& op) {
  const TensorType& stack = op.input_type(0);
  TRAINRT_REQUIRE(!stack.shape.empty(), kInvalidModel, op.node().op_type, ": wants [n, ...]");
  return {stack.dtype, Shape(stack.shape.begin() + 1, stack.shape.end())};
}

// The schedule of the attributes touches `wanted` entries of the stack.
void require_entries(const OpContext& op, int64_t wanted) {
  TRAINRT_REQUIRE(op.input_shape(0)[0] >= wanted,
                  kInvalidModel,
                  op.node().op_type,
                  ": wants a stack of ",
                  wanted,
                  " entries, found ",
                  shape_string(op.input_shape(0)));
}

// "a0 a1 ..." for the dims behind the first.
std::string inner_dims(const OpContext& op) {
  std::string dims;
  for (size_t d = 1; d < op.input_shape(0).size(); ++d) {
    dims += concat(" a", d);
  }
  return dims;
}

template <typename T>
void accumulate_tree(KernelContext& k) {
  const int64_t micro_batch = *k.input<int64_t>(2);
  const auto at = [&](const char* name) {
    return k.attributes().get_ints(name).at(static_cast<size_t>(micro_batch));
  };
  const int64_t slot = at("slot"), merges = at("merges");
  const bool first = at("first") != 0;
  const int64_t size = num_elements(k.input_shape(1));
  T* slots = k.output<T>(0);
  const T* term = k.input<T>(1);
  k.parallel_for(size, kGrain, [&](int64_t begin, int64_t end) {
    T* top = slots + slot * size;
    if (first) {
      std::copy(term + begin, term + end, top + begin);
    } else {
      for (int64_t i = begin; i < end; ++i) {
        top[i] += term[i];
      }
    }
    for (int64_t merge = 0; merge < merges; ++merge, top -= size) {
      T* left = top - size;
      for (int64_t i = begin; i < end; ++i) {
        left[i] += top[i];
      }
    }
  });
}

template <typename T>
void tree_sum(KernelContext& k) {
  const std::vector<int64_t>& merges = k.attributes().get_ints("merges");
  const int64_t size = num_elements(k.output_type(0).shape);
  const T* subtrees = k.input<T>(0);
  T* out = k.output<T>(0);
  k.parallel_for(size, kGrain, [&](int64_t begin, int64_t end) {
    std::array<std::array<T, kBlock>, kMaxDepth> stack;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t count = std::min(kBlock, end - block);
      size_t depth = 0;
      for (size_t j = 0; j < merges.size(); ++j) {
        const T* subtree = subtrees + static_cast<int64_t>(j) * size + block;
        std::copy(subtree, subtree + count, stack[depth++].begin());
        for (int64_t merge = 0; merge < merges[j]; ++merge) {
          --depth;
          for (int64_t i = 0; i < count; ++i) {
            stack[depth - 1][static_cast<size_t>(i)] += stack[depth][static_cast<size_t>(i)];
          }
        }
      }
      std::copy(stack[0].begin(), stack[0].begin() + count, out + block);
    }
  });
}

const RegisterOp kAccumulateTree{{
    .name = "AccumulateTree",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      TRAINRT_REQUIRE(op.input_type(1) == element_of_stack(op),
                      kInvalidModel,
                      "AccumulateTree: slots are ",
                      shape_string(op.input_shape(0)),
                      ", term is ",
                      shape_string(op.input_shape(1)));
      int64_t slots = 0;
      for (const int64_t slot : op.attributes().get_ints("slot")) {
        slots = std::max(slots, slot + 1);
      }
      require_entries(op, slots);
      return {op.input_type(0)};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost;
      cost.flops = 2.0 * static_cast<double>(op.num_elements(1));
      cost.bytes = 4.0 * static_cast<double>(op.input_type(1).bytes());
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const std::string dims = inner_dims(op);
      return Factors(op, "n" + dims + "," + dims + ", -> n" + dims).whole("n");
    },
    .reference_kernel =
        [](KernelContext& k) {
          dispatch_floating(k.input_dtype(0), [&](auto tag) { accumulate_tree<decltype(tag)>(k); });
        },
    .not_differentiable = true,
    .inplace = {{0, 0, true}},
    .examples =
        {{.name = "third_micro_batch",
          .attributes = {{"slot", Shape{0, 0, 1}},
                         {"first", Shape{1, 0, 1}},
                         {"merges", Shape{0, 0, 1}}},
          .inputs = {{DType::kFloat32, {2, 4, 6}}, {DType::kFloat32, {4, 6}}, {DType::kInt64, {}}},
          .values = {Tensor(), Tensor(), Tensor::from(std::vector<int64_t>{2}, {})}}},
}};

const RegisterOp kTreeSum{{
    .name = "TreeSum",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      const TensorType element = element_of_stack(op);
      require_entries(op, std::ssize(op.attributes().get_ints("merges")));
      return {element};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const std::string dims = inner_dims(op);
      return Factors(op, "n" + dims + " ->" + dims).whole("n").linear({{0}});
    },
    .reference_kernel =
        [](KernelContext& k) {
          dispatch_floating(k.input_dtype(0), [&](auto tag) { tree_sum<decltype(tag)>(k); });
        },
    .not_differentiable = true,
    .examples = {{.name = "three",
                  .attributes = {{"merges", Shape{0, 1, 1}}},
                  .inputs = {{DType::kFloat32, {3, 4, 6}}}}},
}};

}  // namespace

}  // namespace trainrt
