// The recurrence. Samples are independent, so a task takes kRows samples through all steps, with
// its state in the workspace; per step one small product h . r^T and element-wise work. The
// gradient computes the gates again from the saved hidden (and cell) states, so that only these are
// kept.
//
// Steps of a sample are numbered in the order they are computed: step s reads time s, or with
// `reverse` time length - 1 - s. Beyond its length a sample's y is 0 and its state stands still.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/gemm_tile.h"
#include "ops/index_check.h"
#include "ops/recurrent.h"
#include "ops/recurrent_activation.h"
#include "ops/recurrent_scratch.h"
#include "ops/vector_math.h"

namespace trainrt::recurrent {

namespace {

constexpr int64_t kRows = 16;  // samples per task

// x[0, n) becomes activate(clip(x)). The common functions have loops of their own, which vectorise.
template <typename T>
void activate_row(const Cell& cell, const Activation& a, T* x, int64_t n) {
  if (cell.clip > 0) {
    const T clip = static_cast<T>(cell.clip);
    for (int64_t j = 0; j < n; ++j) {
      x[j] = std::min(clip, std::max(-clip, x[j]));
    }
  }
  if (a.kind == Activation::Kind::kSigmoid) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      x[j] = vmath::sigmoid(x[j]);
    }
  } else if (a.kind == Activation::Kind::kTanh) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      x[j] = vmath::tanh(x[j]);
    }
  } else {
    for (int64_t j = 0; j < n; ++j) {
      x[j] = activate(a, x[j]);
    }
  }
}

// The tensors of a node that both passes read.
template <typename T>
struct Tensors {
  explicit Tensors(const KernelContext& op)
      : xproj(op.input<T>(kXproj)),
        r(op.input<T>(kR)),
        rb(op.input<T>(kRb)),
        h0(op.input<T>(kH0)),
        c0(op.input<T>(kC0)),
        p(op.input<T>(kP)),
        lens(op.input<int32_t>(kLens)) {}
  const T *xproj, *r, *rb, *h0, *c0, *p;
  const int32_t* lens;
};

int64_t length_of(const Cell& cell, const int32_t* lens, int64_t sample) {
  return lens == nullptr ? cell.steps : lens[sample];
}

int64_t time_of(const Cell& cell, int64_t length, int64_t step) {
  return cell.reverse ? length - 1 - step : step;
}

// Arrays of a task. `rt` (r transposed, shared by all tasks) comes first in the workspace.
template <typename T>
struct Scratch {
  Scratch(const Cell& cell, T* base) {
    const int64_t state = kRows * cell.hidden, gates = state * cell.gates();
    T* next = base;
    const auto take = [&next, this](int64_t n) {
      T* array = next;
      next += n;
      count += n;
      return array;
    };
    h = take(state);
    c = take(state);
    reset = take(state);
    dh = take(state);
    dc = take(state);
    product = take(gates);  // h . r^T + rb
    act = take(gates);      // gate values
    grad = take(gates);
    dp = take(3 * cell.hidden);
  }
  T *h, *c, *reset, *dh, *dc, *product, *act, *grad, *dp;
  int64_t count = 0;
};

template <typename T>
int64_t scratch_count(const Cell& cell) {
  const int64_t state = kRows * cell.hidden;
  return (5 + 3 * cell.gates()) * state + 3 * cell.hidden;
}

int64_t num_tasks(const Cell& cell) {
  return (cell.batch + kRows - 1) / kRows;
}

// columns [first, last) of h . r^T + rb for `rows` samples.
template <typename T>
void recurrent_product(const Cell& cell,
                       const Tensors<T>& t,
                       const T* rt,
                       const T* h,
                       int64_t rows,
                       int64_t first,
                       int64_t last,
                       T* out) {
  const int64_t width = cell.gates() * cell.hidden;
  for (int64_t b = 0; b < rows; ++b) {
    std::copy(t.rb + first, t.rb + last, out + b * width + first);
  }
  gemm_small<T>({h, cell.hidden, 1},
                rt + first,
                width,
                out + first,
                width,
                rows,
                last - first,
                cell.hidden,
                true);
}

// Gate values of one step into s.act, from s.h, s.c; for a GRU also s.product (before the reset)
// and s.reset = r * h. Row b of the task reads xproj at offset x[b], or stands still where x[b] <
// 0.
template <typename T>
void compute_gates(const Cell& cell,
                   const Tensors<T>& t,
                   const T* rt,
                   int64_t rows,
                   const int64_t* x,
                   Scratch<T>& s) {
  const int64_t n = cell.hidden, width = cell.gates() * n;
  const bool resets_first = cell.kind == CellKind::kGru && !cell.linear_before_reset;
  recurrent_product(cell, t, rt, s.h, rows, int64_t{0}, resets_first ? 2 * n : width, s.product);
  for (int64_t b = 0; b < rows; ++b) {
    if (x[b] < 0) {
      continue;
    }
    const T* in = t.xproj + x[b];
    const T* product = s.product + b * width;
    const T* c = s.c + b * n;
    T* act = s.act + b * width;
    const int64_t plain = cell.kind == CellKind::kGru ? 2 * n : width;
    for (int64_t j = 0; j < plain; ++j) {
      act[j] = in[j] + product[j];
    }
    if (cell.kind == CellKind::kRnn) {
      activate_row(cell, cell.activations[0], act, n);
    } else if (cell.kind == CellKind::kGru) {
      activate_row(cell, cell.activations[0], act, 2 * n);  // update z, reset r
      for (int64_t j = 0; j < n; ++j) {
        s.reset[b * n + j] = act[n + j] * s.h[b * n + j];
      }
    } else {  // input, output, forget, cell; the output gate's peephole sees the new cell
      for (int64_t j = 0; t.p != nullptr && j < n; ++j) {
        act[j] += t.p[j] * c[j];
        act[2 * n + j] += t.p[2 * n + j] * c[j];
      }
      activate_row(cell, cell.activations[0], act, n);
      activate_row(cell, cell.activations[0], act + 2 * n, n);
      activate_row(cell, cell.activations[1], act + 3 * n, n);
      for (int64_t j = 0; cell.input_forget && j < n; ++j) {
        act[2 * n + j] = T(1) - act[j];
      }
      for (int64_t j = 0; t.p != nullptr && j < n; ++j) {
        act[n + j] += t.p[n + j] * (act[2 * n + j] * c[j] + act[j] * act[3 * n + j]);
      }
      activate_row(cell, cell.activations[0], act + n, n);
    }
  }
  if (cell.kind != CellKind::kGru) {
    return;
  }
  if (resets_first) {
    recurrent_product(cell, t, rt, s.reset, rows, 2 * n, width, s.product);
  }
  for (int64_t b = 0; b < rows; ++b) {
    if (x[b] < 0) {
      continue;
    }
    T* act = s.act + b * width;
    for (int64_t j = 2 * n; j < width; ++j) {
      const T reset = cell.linear_before_reset ? act[j - n] : T(1);
      act[j] = t.xproj[x[b] + j] + reset * s.product[b * width + j];
    }
    activate_row(cell, cell.activations[1], act + 2 * n, n);
  }
}

// State of row b after the step, from s.act: into h and c.
template <typename T>
void advance(const Cell& cell, int64_t b, const Scratch<T>& s, T* h, T* c) {
  const int64_t n = cell.hidden;
  const T* act = s.act + b * cell.gates() * n;
  if (cell.kind == CellKind::kRnn) {
    std::copy(act, act + n, h);
  } else if (cell.kind == CellKind::kGru) {
    for (int64_t j = 0; j < n; ++j) {
      h[j] = (T(1) - act[j]) * act[2 * n + j] + act[j] * h[j];
    }
  } else {
    for (int64_t j = 0; j < n; ++j) {
      c[j] = act[2 * n + j] * c[j] + act[j] * act[3 * n + j];
      h[j] = act[n + j] * activate(cell.activations[2], c[j]);
    }
  }
}

// Where the rows of a task read their inputs at one step.
void locate(const Cell& cell,
            const int32_t* lens,
            int64_t first,
            int64_t rows,
            int64_t step,
            int64_t width,
            int64_t* x) {
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t length = length_of(cell, lens, first + b);
    x[b] = step < length ? (time_of(cell, length, step) * cell.batch + first + b) * width : -1;
  }
}

template <typename T>
void zero_beyond(const Cell& cell, const int32_t* lens, int64_t sample, int64_t width, T* out) {
  for (int64_t time = length_of(cell, lens, sample); out != nullptr && time < cell.steps; ++time) {
    T* row = out + (time * cell.batch + sample) * width;
    std::fill(row, row + width, T(0));
  }
}

template <typename T>
void transpose_r(const Cell& cell, const T* r, T* rt) {
  const int64_t width = cell.gates() * cell.hidden;
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t j = 0; j < cell.hidden; ++j) {
      rt[j * width + i] = r[i * cell.hidden + j];
    }
  }
}

template <typename T>
void forward_task(KernelContext& op, const Cell& cell, const T* rt, int64_t first, Scratch<T> s) {
  const Tensors<T> t(op);
  const int64_t n = cell.hidden, width = cell.gates() * n;
  const int64_t rows = std::min(kRows, cell.batch - first);
  const bool lstm = cell.kind == CellKind::kLstm;
  T* y = op.output<T>(0);
  T* c_all = lstm ? op.output<T>(3) : nullptr;
  std::copy(t.h0 + first * n, t.h0 + (first + rows) * n, s.h);
  if (lstm) {
    std::copy(t.c0 + first * n, t.c0 + (first + rows) * n, s.c);
  }
  int64_t x[kRows] = {};
  for (int64_t step = 0; step < cell.steps; ++step) {
    locate(cell, t.lens, first, rows, step, width, x);
    compute_gates(cell, t, rt, rows, x, s);
    for (int64_t b = 0; b < rows; ++b) {
      if (x[b] < 0) {
        continue;
      }
      T* h = s.h + b * n;
      T* c = s.c + b * n;
      advance(cell, b, s, h, c);
      if (y != nullptr) {
        std::copy(h, h + n, y + x[b] / width * n);
      }
      if (c_all != nullptr) {
        std::copy(c, c + n, c_all + x[b] / width * n);
      }
    }
  }
  for (int64_t b = 0; b < rows; ++b) {
    zero_beyond(cell, t.lens, first + b, n, y);
    zero_beyond(cell, t.lens, first + b, n, c_all);
  }
  if (T* h_n = op.output<T>(1)) {
    std::copy(s.h, s.h + rows * n, h_n + first * n);
  }
  if (T* c_n = lstm ? op.output<T>(2) : nullptr) {
    std::copy(s.c, s.c + rows * n, c_n + first * n);
  }
}

// Gradients of one row at one step: s.dh, s.dc hold those of its state after the step; leaves those
// of pre-activations in s.grad and those of the state before the step, but for the recurrent
// product, in s.dh, s.dc.
template <typename T>
void backward_row(const Cell& cell, const Tensors<T>& t, int64_t b, const T* c_now, Scratch<T>& s) {
  const int64_t n = cell.hidden, width = cell.gates() * n;
  const T* act = s.act + b * width;
  const T* c = s.c + b * n;
  T* grad = s.grad + b * width;
  T* dh = s.dh + b * n;
  T* dc = s.dc + b * n;
  for (int64_t j = 0; j < n; ++j) {
    if (cell.kind == CellKind::kRnn) {
      grad[j] = dh[j] * derivative(cell.activations[0], act[j]);
      dh[j] = T(0);
    } else if (cell.kind == CellKind::kGru) {
      const T z = act[j], candidate = act[2 * n + j];
      grad[j] = dh[j] * (s.h[b * n + j] - candidate) * derivative(cell.activations[0], z);
      grad[2 * n + j] = dh[j] * (T(1) - z) * derivative(cell.activations[1], candidate);
      dh[j] *= z;
    } else {
      const T i = act[j], o = act[n + j], f = act[2 * n + j], g = act[3 * n + j];
      const T value = activate(cell.activations[2], c_now[j]);
      grad[n + j] = dh[j] * value * derivative(cell.activations[0], o);
      T dcell = dc[j] + dh[j] * o * derivative(cell.activations[2], value);
      if (t.p != nullptr) {
        dcell += grad[n + j] * t.p[n + j];
        s.dp[n + j] += grad[n + j] * c_now[j];
      }
      const T df = dcell * c[j];
      grad[j] = (dcell * g - (cell.input_forget ? df : T(0))) * derivative(cell.activations[0], i);
      grad[2 * n + j] = cell.input_forget ? T(0) : df * derivative(cell.activations[0], f);
      grad[3 * n + j] = dcell * i * derivative(cell.activations[1], g);
      dc[j] = dcell * f;
      if (t.p != nullptr) {
        dc[j] += grad[j] * t.p[j] + grad[2 * n + j] * t.p[2 * n + j];
        s.dp[j] += grad[j] * c[j];
        s.dp[2 * n + j] += grad[2 * n + j] * c[j];
      }
      dh[j] = T(0);
    }
  }
}

// dh of the state before the step through the recurrent product; completes the GRU's reset gate.
template <typename T>
void backward_product(
    const Cell& cell, const Tensors<T>& t, int64_t rows, const int64_t* x, T* drec, Scratch<T>& s) {
  const int64_t n = cell.hidden, width = cell.gates() * n;
  if (cell.kind != CellKind::kGru) {
    gemm_small<T>({s.grad, width, 1}, t.r, n, s.dh, n, rows, n, width, true);
    return;
  }
  if (!cell.linear_before_reset) {
    // Through the candidate's product with r * h: s.reset becomes its gradient.
    gemm_small<T>({s.grad + 2 * n, width, 1}, t.r + 2 * n * n, n, s.reset, n, rows, n, n, false);
  }
  for (int64_t b = 0; b < rows; ++b) {
    const T* act = s.act + b * width;
    T* grad = s.grad + b * width;
    for (int64_t j = 0; x[b] >= 0 && j < n; ++j) {
      T dreset;
      if (cell.linear_before_reset) {
        dreset = grad[2 * n + j] * s.product[b * width + 2 * n + j];
      } else {
        dreset = s.reset[b * n + j] * s.h[b * n + j];
        s.dh[b * n + j] += s.reset[b * n + j] * act[n + j];
      }
      grad[n + j] = dreset * derivative(cell.activations[0], act[n + j]);
    }
  }
  // Gradients of the recurrent product: those of the pre-activations, the candidate's times the
  // reset gate where that comes after.
  for (int64_t b = 0; b < rows; ++b) {
    T* product = s.product + b * width;
    std::copy(s.grad + b * width, s.grad + (b + 1) * width, product);
    for (int64_t j = 2 * n; x[b] >= 0 && cell.linear_before_reset && j < width; ++j) {
      product[j] *= s.act[b * width + j - n];
    }
    if (drec != nullptr && x[b] >= 0) {
      std::copy(product, product + width, drec + x[b]);
    }
  }
  gemm_small<T>({s.product, width, 1},
                t.r,
                n,
                s.dh,
                n,
                rows,
                n,
                cell.linear_before_reset ? width : 2 * n,
                true);
}

// The state of row b before `step`.
template <typename T>
void load_before(const Cell& cell,
                 const T* initial,
                 const T* all,
                 int64_t sample,
                 int64_t length,
                 int64_t step,
                 T* out) {
  const int64_t n = cell.hidden;
  const T* from = step == 0 ? initial + sample * n
                            : all + (time_of(cell, length, step - 1) * cell.batch + sample) * n;
  std::copy(from, from + n, out);
}

template <typename T>
void add_row(const T* from, int64_t n, T* to) {
  for (int64_t j = 0; from != nullptr && j < n; ++j) {
    to[j] += from[j];
  }
}

template <typename T>
void backward_task(KernelContext& op, const Cell& cell, const T* rt, int64_t first, Scratch<T> s) {
  const Tensors<T> t(op);
  const int64_t n = cell.hidden, width = cell.gates() * n;
  const int64_t rows = std::min(kRows, cell.batch - first);
  const bool lstm = cell.kind == CellKind::kLstm, gru = cell.kind == CellKind::kGru;
  const T *y = op.input<T>(kY), *c_all = op.input<T>(kCAll);
  const T *dy = op.input<T>(kDy), *dc_all = op.input<T>(kDcAll);
  T *dxproj = op.output<T>(0), *hprev = op.output<T>(1);
  T *drec = gru ? op.output<T>(3) : nullptr, *reset = gru ? op.output<T>(4) : nullptr;
  std::fill(s.dh, s.dh + rows * n, T(0));
  std::fill(s.dc, s.dc + rows * n, T(0));
  std::fill(s.dp, s.dp + 3 * n, T(0));
  for (int64_t b = 0; b < rows; ++b) {
    add_row(op.input<T>(kDhN) ? op.input<T>(kDhN) + (first + b) * n : nullptr, n, s.dh + b * n);
    add_row(op.input<T>(kDcN) ? op.input<T>(kDcN) + (first + b) * n : nullptr, n, s.dc + b * n);
    for (const auto& [out, columns] :
         {std::pair{dxproj, width}, {hprev, n}, {drec, width}, {reset, n}}) {
      zero_beyond(cell, t.lens, first + b, columns, out);
    }
  }
  int64_t x[kRows] = {};
  for (int64_t step = cell.steps; step-- > 0;) {
    locate(cell, t.lens, first, rows, step, width, x);
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t length = length_of(cell, t.lens, first + b);
      // Rows that stand still compute with zeros that reach nothing.
      std::fill(s.grad + b * width, s.grad + (b + 1) * width, T(0));
      std::fill(s.h + b * n, s.h + (b + 1) * n, T(0));
      if (x[b] < 0) {
        continue;
      }
      load_before(cell, t.h0, y, first + b, length, step, s.h + b * n);
      if (lstm) {
        load_before(cell, t.c0, c_all, first + b, length, step, s.c + b * n);
      }
      add_row(dy ? dy + x[b] / width * n : nullptr, n, s.dh + b * n);
      add_row(dc_all ? dc_all + x[b] / width * n : nullptr, n, s.dc + b * n);
      if (hprev != nullptr) {
        std::copy(s.h + b * n, s.h + (b + 1) * n, hprev + x[b] / width * n);
      }
    }
    compute_gates(cell, t, rt, rows, x, s);
    for (int64_t b = 0; b < rows; ++b) {
      if (x[b] < 0) {
        continue;
      }
      if (reset != nullptr) {
        std::copy(s.reset + b * n, s.reset + (b + 1) * n, reset + x[b] / width * n);
      }
      backward_row(cell, t, b, lstm ? c_all + x[b] / width * n : nullptr, s);
    }
    backward_product(cell, t, rows, x, drec, s);
    for (int64_t b = 0; b < rows; ++b) {
      if (x[b] >= 0 && dxproj != nullptr) {
        std::copy(s.grad + b * width, s.grad + (b + 1) * width, dxproj + x[b]);
      }
    }
  }
  if (T* dh0 = op.output<T>(2)) {
    std::copy(s.dh, s.dh + rows * n, dh0 + first * n);
  }
  if (T* dc0 = lstm ? op.output<T>(3) : nullptr) {
    std::copy(s.dc, s.dc + rows * n, dc0 + first * n);
  }
}

// Runs `task` for every group of samples. base: rt, then the arrays of each task.
template <typename T, typename Task>
void run(KernelContext& op, const Cell& cell, T* base, const Task& task) {
  T* rt = base;
  transpose_r(cell, op.input<T>(kR), rt);
  T* scratch = rt + cell.gates() * cell.hidden * cell.hidden;
  op.parallel_for(num_tasks(cell), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      task(op, cell, rt, i * kRows, Scratch<T>(cell, scratch + i * scratch_count<T>(cell)));
    }
  });
}

template <typename T>
int64_t workspace_count(const Cell& cell) {
  return cell.gates() * cell.hidden * cell.hidden + num_tasks(cell) * scratch_count<T>(cell);
}

template <typename T>
void backward(KernelContext& op, T* base) {
  const Cell cell = cell_of(op.attributes(), op.input_shape(kXproj));
  run<T>(op, cell, base, backward_task<T>);
  T* dp = cell.kind == CellKind::kLstm ? op.output<T>(4) : nullptr;
  if (dp == nullptr) {
    return;
  }
  const T* scratch = base + cell.gates() * cell.hidden * cell.hidden;
  for (int64_t j = 0; j < 3 * cell.hidden; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < num_tasks(cell); ++i) {
      const int64_t end = (i + 1) * scratch_count<T>(cell);  // dp is the last array
      sum += static_cast<double>(scratch[end - 3 * cell.hidden + j]);
    }
    dp[j] = static_cast<T>(sum);
  }
}

template <typename T>
void forward(KernelContext& op, T* base) {
  const Cell cell = cell_of(op.attributes(), op.input_shape(kXproj));
  require_lengths<int32_t>(op, kLens, cell.steps);
  run<T>(op, cell, base, forward_task<T>);
}

int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  const Cell cell = cell_of(op.attributes(), op.input_shape(kXproj));
  if (spec.backend == Backend::kCuda) {  // in the type of computation
    return cell.batch * scratch_elements(cell.gates(), cell.hidden) *
           (op.input_dtype(kXproj) == DType::kFloat64 ? 8 : 4);
  }
  return workspace_count<float>(cell) * dtype_bytes(op.input_dtype(kXproj));
}

}  // namespace

int64_t forward_workspace(const OpContext& op, const DeviceSpec& spec) {
  return workspace(op, spec);
}
int64_t backward_workspace(const OpContext& op, const DeviceSpec& spec) {
  return workspace(op, spec);
}

void forward_fast(KernelContext& op) {
  dispatch_floating(op.input_dtype(kXproj), [&](auto tag) {
    using T = decltype(tag);
    forward<T>(op, reinterpret_cast<T*>(op.workspace().data()));
  });
}

void backward_fast(KernelContext& op) {
  dispatch_floating(op.input_dtype(kXproj), [&](auto tag) {
    using T = decltype(tag);
    backward<T>(op, reinterpret_cast<T*>(op.workspace().data()));
  });
}

// The recurrence has one implementation; the reference differs in owning its memory.
void forward_reference(KernelContext& op) {
  dispatch_floating(op.input_dtype(kXproj), [&](auto tag) {
    using T = decltype(tag);
    const Cell cell = cell_of(op.attributes(), op.input_shape(kXproj));
    std::vector<T> memory(static_cast<size_t>(workspace_count<T>(cell)));
    forward<T>(op, memory.data());
  });
}

void backward_reference(KernelContext& op) {
  dispatch_floating(op.input_dtype(kXproj), [&](auto tag) {
    using T = decltype(tag);
    const Cell cell = cell_of(op.attributes(), op.input_shape(kXproj));
    std::vector<T> memory(static_cast<size_t>(workspace_count<T>(cell)));
    backward<T>(op, memory.data());
  });
}

}  // namespace trainrt::recurrent
