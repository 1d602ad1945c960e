// CUDA kernels of Recurrent and RecurrentGrad (ops/recurrent.cc describes them). A team of lanes
// takes one sample through all steps, its state in the workspace: the recurrence is sequential in
// time, and samples are independent. Hidden units are spread over the lanes; each reads its row of
// r per step. The gradient computes the gates again from the saved states.
#include <cmath>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/recurrent.h"
#include "ops/recurrent_scratch.h"

namespace trainrt::recurrent {

namespace {

// ops/recurrent.h's Cell as a kernel can carry it.
struct DeviceCell {
  CellKind kind;
  Activation f, g, h;
  bool reverse, linear_before_reset, input_forget;
  double clip;
  int64_t steps, batch, hidden, gates;
  TRAINRT_HOST_DEVICE int64_t width() const { return gates * hidden; }
};

DeviceCell device_cell(const Cell& cell) {
  const auto at = [&cell](size_t i) {
    return i < cell.activations.size() ? cell.activations[i] : Activation{};
  };
  return {cell.kind,
          at(0),
          at(1),
          at(2),
          cell.reverse,
          cell.linear_before_reset,
          cell.input_forget,
          cell.clip,
          cell.steps,
          cell.batch,
          cell.hidden,
          cell.gates()};
}

template <typename T, typename C>
struct Common {
  DeviceCell cell;
  const T *xproj, *r, *rb, *h0, *c0, *p;
  const int32_t* lens;
  C* scratch;

  TRAINRT_HOST_DEVICE int64_t length(int64_t sample) const {
    const int64_t n = lens == nullptr ? cell.steps : lens[sample];
    return n < 0 ? 0 : n > cell.steps ? cell.steps : n;
  }
  TRAINRT_HOST_DEVICE int64_t time(int64_t n, int64_t step) const {
    return cell.reverse ? n - 1 - step : step;
  }
  TRAINRT_HOST_DEVICE C clipped(C x) const {
    const C limit = static_cast<C>(cell.clip);
    return cell.clip <= 0 ? x : x < -limit ? -limit : x > limit ? limit : x;
  }
  // Row `i` of r times the state.
  TRAINRT_HOST_DEVICE C product(int64_t i, const C* h) const {
    C sum = to_compute<C>(rb[i]);
    for (int64_t j = 0; j < cell.hidden; ++j) {
      sum += to_compute<C>(r[i * cell.hidden + j]) * h[j];
    }
    return sum;
  }
};

// Arrays of one sample in the workspace.
template <typename C>
struct State {
  C *h, *c, *reset, *product, *act, *dh, *dc, *grad, *next, *dp;
  TRAINRT_HOST_DEVICE State(C* base, int64_t n, int64_t gates) {
    h = base;
    c = h + n;
    reset = c + n;
    dh = reset + n;
    dc = dh + n;
    next = dc + n;
    dp = next + n;
    product = dp + 3 * n;
    act = product + gates * n;
    grad = act + gates * n;
  }
};

// Gate values of one step into s.act, from s.h and s.c; for a GRU also s.product (before the reset)
// and s.reset = r * h.
template <typename T, typename C, typename Lanes>
TRAINRT_HOST_DEVICE void compute_gates(const Common<T, C>& t,
                                       const Lanes& team,
                                       const T* in,
                                       const State<C>& s) {
  const DeviceCell& cell = t.cell;
  const int64_t n = cell.hidden;
  if (cell.kind == CellKind::kRnn) {
    team.for_each(n, [&](int64_t j) {
      s.act[j] = activate(cell.f, t.clipped(to_compute<C>(in[j]) + t.product(j, s.h)));
    });
  } else if (cell.kind == CellKind::kLstm) {  // input, output, forget, cell
    team.for_each(n, [&](int64_t j) {
      C pre[4];
      for (int64_t gate = 0; gate < 4; ++gate) {
        pre[gate] = to_compute<C>(in[gate * n + j]) + t.product(gate * n + j, s.h);
      }
      if (t.p != nullptr) {
        pre[0] += to_compute<C>(t.p[j]) * s.c[j];
        pre[2] += to_compute<C>(t.p[2 * n + j]) * s.c[j];
      }
      const C i = activate(cell.f, t.clipped(pre[0]));
      C f = activate(cell.f, t.clipped(pre[2]));
      const C g = activate(cell.g, t.clipped(pre[3]));
      f = cell.input_forget ? C(1) - i : f;
      if (t.p != nullptr) {
        pre[1] += to_compute<C>(t.p[n + j]) * (f * s.c[j] + i * g);
      }
      s.act[j] = i;
      s.act[n + j] = activate(cell.f, t.clipped(pre[1]));
      s.act[2 * n + j] = f;
      s.act[3 * n + j] = g;
    });
  } else {  // update z, reset r, candidate
    team.for_each(2 * n, [&](int64_t j) {
      s.act[j] = activate(cell.f, t.clipped(to_compute<C>(in[j]) + t.product(j, s.h)));
    });
    team.synchronize();
    team.for_each(n, [&](int64_t j) { s.reset[j] = s.act[n + j] * s.h[j]; });
    team.synchronize();
    team.for_each(n, [&](int64_t j) {
      const int64_t row = 2 * n + j;
      s.product[row] = t.product(row, cell.linear_before_reset ? s.h : s.reset);
      const C reset = cell.linear_before_reset ? s.act[n + j] : C(1);
      s.act[row] = activate(cell.g, t.clipped(to_compute<C>(in[row]) + reset * s.product[row]));
    });
  }
  team.synchronize();
}

template <typename T, typename C>
struct ForwardSample {
  Common<T, C> t;
  T *y, *h_n, *c_n, *c_all;

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t sample) const {
    const DeviceCell& cell = t.cell;
    const int64_t n = cell.hidden, length = t.length(sample);
    const ForwardSample& self = *this;
    const State<C> s(t.scratch + sample * scratch_elements(cell.gates, n), n, cell.gates);
    team.for_each(n, [&](int64_t j) {
      s.h[j] = to_compute<C>(self.t.h0[sample * n + j]);
      s.c[j] = self.t.c0 == nullptr ? C(0) : to_compute<C>(self.t.c0[sample * n + j]);
    });
    team.synchronize();
    for (int64_t step = 0; step < length; ++step) {
      const int64_t row = t.time(length, step) * cell.batch + sample;
      compute_gates(t, team, t.xproj + row * cell.width(), s);
      team.for_each(n, [&](int64_t j) {
        const C* act = s.act;
        if (cell.kind == CellKind::kRnn) {
          s.h[j] = act[j];
        } else if (cell.kind == CellKind::kGru) {
          s.h[j] = (C(1) - act[j]) * act[2 * n + j] + act[j] * s.h[j];
        } else {
          s.c[j] = act[2 * n + j] * s.c[j] + act[j] * act[3 * n + j];
          s.h[j] = act[n + j] * activate(cell.h, s.c[j]);
        }
        if (self.y != nullptr) {
          self.y[row * n + j] = to_storage<T>(s.h[j]);
        }
        if (self.c_all != nullptr) {
          self.c_all[row * n + j] = to_storage<T>(s.c[j]);
        }
      });
      team.synchronize();
    }
    for (int64_t time = length; time < cell.steps; ++time) {  // beyond its length y is 0
      team.for_each(n, [&](int64_t j) {
        const int64_t at = (time * cell.batch + sample) * n + j;
        if (self.y != nullptr) {
          self.y[at] = to_storage<T>(C(0));
        }
        if (self.c_all != nullptr) {
          self.c_all[at] = to_storage<T>(C(0));
        }
      });
    }
    team.for_each(n, [&](int64_t j) {
      if (self.h_n != nullptr) {
        self.h_n[sample * n + j] = to_storage<T>(s.h[j]);
      }
      if (self.c_n != nullptr) {
        self.c_n[sample * n + j] = to_storage<T>(s.c[j]);
      }
    });
  }
};

template <typename T, typename C>
struct BackwardSample {
  Common<T, C> t;
  const T *y, *c_all, *dy, *dh_n, *dc_n, *dc_all;
  T *dxproj, *hprev, *dh0, *drec, *reset, *dc0;

  TRAINRT_HOST_DEVICE static C value(const T* data, int64_t i) {
    return data == nullptr ? C(0) : to_compute<C>(data[i]);
  }
  TRAINRT_HOST_DEVICE static void put(T* data, int64_t i, C number) {
    if (data != nullptr) {
      data[i] = to_storage<T>(number);
    }
  }

  // Gradients of unit j: of the pre-activations into s.grad, and of the state before the step, but
  // for the recurrent product, into s.dh and s.dc.
  TRAINRT_HOST_DEVICE void unit(int64_t j, int64_t row, const State<C>& s) const {
    const DeviceCell& cell = t.cell;
    const int64_t n = cell.hidden;
    const C* act = s.act;
    if (cell.kind == CellKind::kRnn) {
      s.grad[j] = s.dh[j] * derivative(cell.f, act[j]);
      s.dh[j] = C(0);
    } else if (cell.kind == CellKind::kGru) {
      const C z = act[j], candidate = act[2 * n + j];
      s.grad[j] = s.dh[j] * (s.h[j] - candidate) * derivative(cell.f, z);
      s.grad[2 * n + j] = s.dh[j] * (C(1) - z) * derivative(cell.g, candidate);
      s.dh[j] *= z;
    } else {
      const C i = act[j], o = act[n + j], f = act[2 * n + j], g = act[3 * n + j], c = s.c[j];
      const C now = to_compute<C>(c_all[row * n + j]), shown = activate(cell.h, now);
      s.grad[n + j] = s.dh[j] * shown * derivative(cell.f, o);
      C dcell = s.dc[j] + s.dh[j] * o * derivative(cell.h, shown);
      if (t.p != nullptr) {
        dcell += s.grad[n + j] * to_compute<C>(t.p[n + j]);
        s.dp[n + j] += s.grad[n + j] * now;
      }
      const C df = dcell * c;
      s.grad[j] = (dcell * g - (cell.input_forget ? df : C(0))) * derivative(cell.f, i);
      s.grad[2 * n + j] = cell.input_forget ? C(0) : df * derivative(cell.f, f);
      s.grad[3 * n + j] = dcell * i * derivative(cell.g, g);
      s.dc[j] = dcell * f;
      if (t.p != nullptr) {
        s.dc[j] +=
            s.grad[j] * to_compute<C>(t.p[j]) + s.grad[2 * n + j] * to_compute<C>(t.p[2 * n + j]);
        s.dp[j] += s.grad[j] * c;
        s.dp[2 * n + j] += s.grad[2 * n + j] * c;
      }
      s.dh[j] = C(0);
    }
  }

  // Column j of r times the gradients of the rows [first, last) of the recurrent product.
  TRAINRT_HOST_DEVICE C through_r(int64_t j, const C* grad, int64_t first, int64_t last) const {
    C sum = 0;
    for (int64_t i = first; i < last; ++i) {
      sum += to_compute<C>(t.r[i * t.cell.hidden + j]) * grad[i];
    }
    return sum;
  }

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t sample) const {
    const DeviceCell& cell = t.cell;
    const int64_t n = cell.hidden, width = cell.width(), length = t.length(sample);
    const bool gru = cell.kind == CellKind::kGru;
    const BackwardSample& self = *this;
    const State<C> s(t.scratch + sample * scratch_elements(cell.gates, n), n, cell.gates);
    team.for_each(n, [&](int64_t j) {
      s.dh[j] = value(self.dh_n, sample * n + j);
      s.dc[j] = value(self.dc_n, sample * n + j);
      s.dp[j] = s.dp[n + j] = s.dp[2 * n + j] = C(0);
    });
    team.synchronize();
    for (int64_t step = length; step-- > 0;) {
      const int64_t row = t.time(length, step) * cell.batch + sample;
      const int64_t before = step == 0 ? 0 : t.time(length, step - 1) * cell.batch + sample;
      team.for_each(n, [&](int64_t j) {
        s.h[j] = step == 0 ? to_compute<C>(self.t.h0[sample * n + j])
                           : to_compute<C>(self.y[before * n + j]);
        if (cell.kind == CellKind::kLstm) {
          s.c[j] = step == 0 ? to_compute<C>(self.t.c0[sample * n + j])
                             : to_compute<C>(self.c_all[before * n + j]);
        }
        s.dh[j] += value(self.dy, row * n + j);
        s.dc[j] += value(self.dc_all, row * n + j);
        put(self.hprev, row * n + j, s.h[j]);
      });
      team.synchronize();
      compute_gates(t, team, t.xproj + row * width, s);
      team.for_each(n, [&](int64_t j) {
        if (gru) {
          put(self.reset, row * n + j, s.reset[j]);
        }
        self.unit(j, row, s);
      });
      team.synchronize();
      if (!gru) {
        team.for_each(n, [&](int64_t j) { s.next[j] = self.through_r(j, s.grad, 0, width); });
      } else {
        if (!cell.linear_before_reset) {  // through the candidate's product with r * h
          team.for_each(n, [&](int64_t j) { s.next[j] = self.through_r(j, s.grad, 2 * n, width); });
          team.synchronize();
        }
        team.for_each(n, [&](int64_t j) {
          C dreset;
          if (cell.linear_before_reset) {
            dreset = s.grad[2 * n + j] * s.product[2 * n + j];
          } else {
            dreset = s.next[j] * s.h[j];
            s.dh[j] += s.next[j] * s.act[n + j];
          }
          s.grad[n + j] = dreset * derivative(cell.f, s.act[n + j]);
        });
        team.synchronize();
        // Gradients of the recurrent product: the candidate's times the reset gate where that comes
        // after.
        team.for_each(width, [&](int64_t i) {
          s.product[i] =
              i >= 2 * n && cell.linear_before_reset ? s.grad[i] * s.act[i - n] : s.grad[i];
          put(self.drec, row * width + i, s.product[i]);
        });
        team.synchronize();
        team.for_each(n, [&](int64_t j) {
          s.next[j] = self.through_r(j, s.product, 0, cell.linear_before_reset ? width : 2 * n);
        });
      }
      team.synchronize();
      team.for_each(n, [&](int64_t j) { s.dh[j] += s.next[j]; });
      team.for_each(width, [&](int64_t i) { put(self.dxproj, row * width + i, s.grad[i]); });
      team.synchronize();
    }
    for (int64_t time = length; time < cell.steps; ++time) {
      const int64_t row = time * cell.batch + sample;
      team.for_each(width, [&](int64_t i) {
        put(self.dxproj, row * width + i, C(0));
        put(self.drec, row * width + i, C(0));
      });
      team.for_each(n, [&](int64_t j) {
        put(self.hprev, row * n + j, C(0));
        put(self.reset, row * n + j, C(0));
      });
    }
    team.for_each(n, [&](int64_t j) {
      put(self.dh0, sample * n + j, s.dh[j]);
      put(self.dc0, sample * n + j, s.dc[j]);
    });
  }
};

// dp: the samples' sums, added in order of sample.
template <typename T, typename C>
struct SumPeepholes {
  const C* scratch;
  T* dp;
  int64_t batch, hidden, gates;
  TRAINRT_HOST_DEVICE void operator()(int64_t j) const {
    C sum = 0;
    for (int64_t sample = 0; sample < batch; ++sample) {
      const State<C> s(
          const_cast<C*>(scratch) + sample * scratch_elements(gates, hidden), hidden, gates);
      sum += s.dp[j];
    }
    dp[j] = to_storage<T>(sum);
  }
};

template <typename T>
Common<T, ComputeOf<T>> common_of(KernelContext& context, const Cell& cell) {
  return {device_cell(cell),
          context.input<T>(kXproj),
          context.input<T>(kR),
          context.input<T>(kRb),
          context.input<T>(kH0),
          context.input<T>(kC0),
          context.input<T>(kP),
          context.input<int32_t>(kLens),
          reinterpret_cast<ComputeOf<T>*>(context.workspace().data())};
}

void forward_cuda(KernelContext& context) {
  const Cell cell = cell_of(context.attributes(), context.input_shape(kXproj));
  const bool lstm = cell.kind == CellKind::kLstm;
  dispatch_stored(context.node(), context.input_dtype(kXproj), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 cell.batch,
                 cell.gates() * cell.hidden,
                 ForwardSample<T, ComputeOf<T>>{common_of<T>(context, cell),
                                                context.output<T>(0),
                                                context.output<T>(1),
                                                lstm ? context.output<T>(2) : nullptr,
                                                lstm ? context.output<T>(3) : nullptr});
  });
}

void backward_cuda(KernelContext& context) {
  const Cell cell = cell_of(context.attributes(), context.input_shape(kXproj));
  const bool lstm = cell.kind == CellKind::kLstm, gru = cell.kind == CellKind::kGru;
  dispatch_stored(context.node(), context.input_dtype(kXproj), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    const Common<T, C> common = common_of<T>(context, cell);
    launch_teams(context,
                 cell.batch,
                 cell.gates() * cell.hidden,
                 BackwardSample<T, C>{common,
                                      context.input<T>(kY),
                                      context.input<T>(kCAll),
                                      context.input<T>(kDy),
                                      context.input<T>(kDhN),
                                      context.input<T>(kDcN),
                                      context.input<T>(kDcAll),
                                      context.output<T>(0),
                                      context.output<T>(1),
                                      context.output<T>(2),
                                      gru ? context.output<T>(3) : nullptr,
                                      gru ? context.output<T>(4) : nullptr,
                                      lstm ? context.output<T>(3) : nullptr});
    if (T* dp = lstm ? context.output<T>(4) : nullptr) {
      launch(context,
             3 * cell.hidden,
             SumPeepholes<T, C>{common.scratch, dp, cell.batch, cell.hidden, cell.gates()});
    }
  });
}

const RegisterCudaKernel kForward{"Recurrent", forward_cuda};
const RegisterCudaKernel kBackward{"RecurrentGrad", backward_cuda};

}  // namespace

}  // namespace trainrt::recurrent
