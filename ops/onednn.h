// oneDNN behind OpDef's interface: an operator describes its primitive once, and gets back a kernel
// and the exact number of workspace bytes it needs.
//
// Everything oneDNN would allocate lies in the workspace: its scratchpad (user mode) and copies of
// arguments in the layout a primitive prefers. Primitives are made and run at DeviceSpec::threads,
// since oneDNN cuts work by that number when it makes one.
#pragma once

#include <dnnl.hpp>
#include <functional>
#include <memory>
#include <vector>

#include "graph/op_def.h"

namespace trainrt::onednn {

const dnnl::engine& engine();

// Sets the number of OpenMP threads of the calling thread while in scope.
class ThreadScope {
 public:
  explicit ThreadScope(int threads);
  ~ThreadScope();
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int before_;
  bool changed_;
};

// Whether matrix products and convolutions of this dtype are there on this processor.
bool supports(DType dtype);
dnnl::memory::data_type data_type(DType dtype);
dnnl::memory::desc row_major(DType dtype, const Shape& shape);
dnnl::memory::desc strided(DType dtype, const Shape& shape, const Shape& strides);
dnnl::memory::desc any_layout(DType dtype, const Shape& shape);
dnnl::primitive_attr user_scratchpad();

// One argument of a primitive: DNNL_ARG_*, where it lies, and in which layout it lies there. The
// primitive may want another layout; a copy is then made in the workspace.
struct Argument {
  int id = 0;
  bool is_output = false;
  int index = 0;  // input or output number of the node
  dnnl::memory::desc layout;
};

// A primitive with everything needed to run it. Immutable, so threads may share it.
class Prepared {
 public:
  Prepared(const dnnl::primitive_desc_base& desc,
           const dnnl::primitive& primitive,
           std::vector<Argument> arguments);

  int64_t workspace_bytes() const { return workspace_bytes_; }
  void run(KernelContext& context) const;

 private:
  struct Bound {
    Argument argument;
    dnnl::memory::desc wanted;
    bool reordered = false;
    int64_t offset = 0;  // of the copy, in the workspace
    dnnl::reorder reorder;
  };
  dnnl::primitive primitive_;
  std::vector<Bound> bound_;
  dnnl::memory::desc scratchpad_;
  int64_t scratchpad_offset_ = 0;
  int64_t workspace_bytes_ = 0;
};

using PrepareFn = std::function<Prepared(const OpContext&)>;

// The prepared primitive of this node, made at most once per (operator, attributes, types,
// threads).
std::shared_ptr<const Prepared> prepare(const OpContext& op,
                                        const DeviceSpec& spec,
                                        const PrepareFn& make);

}  // namespace trainrt::onednn
