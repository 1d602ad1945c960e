#include "parallel/program.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <string_view>

namespace trainrt {

const Phase* ProgramVariant::find_phase(PhaseKind kind, int virtual_stage) const {
  for (const Phase& phase : phases) {
    if (phase.kind == kind && phase.virtual_stage == virtual_stage) {
      return &phase;
    }
  }
  return nullptr;
}

std::vector<int> Program::local_stages() const {
  std::vector<int> stages;
  for (const ProgramVariant& variant : variants) {
    for (const Phase& phase : variant.phases) {
      stages.push_back(phase.virtual_stage);
    }
  }
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  return stages;
}

int Program::num_stash_slots(int virtual_stage) const {
  return max_in_flight(cells, virtual_stage);
}

const std::vector<Cell>& Program::row(StepWindow window) const {
  TRAINRT_CHECK(window == StepWindow::kWhole || runs_on());
  return window == StepWindow::kWhole ? cells : windows.at(static_cast<size_t>(window) - 1);
}

std::string persistent_key(const Value& value) {
  if (value.kind != ValueKind::kConstant || !value.constant.defined()) {
    return value.name;
  }
  const std::string_view contents(reinterpret_cast<const char*>(value.constant.raw()),
                                  static_cast<size_t>(value.constant.bytes()));
  return concat(value.name,
                " ",
                shape_string(value.type.shape),
                " ",
                std::hash<std::string_view>{}(contents));
}

bool is_communication(const std::string& op_type) {
  for (const char* known : {comm_op::kAllReduce,
                            comm_op::kReduceScatter,
                            comm_op::kAllGather,
                            comm_op::kAllToAll,
                            comm_op::kBroadcast,
                            comm_op::kSend,
                            comm_op::kRecv}) {
    if (op_type == known) {
      return true;
    }
  }
  return false;
}

std::vector<Inplace> inplace_of(const Node& node) {
  std::vector<Inplace> pairs = get_op(node.op_type).inplace;
  const bool in_place =
      node.op_type == comm_op::kAllReduce ||
      (node.op_type == comm_op::kReduceScatter && node.attributes.get_int("in_place", 0) != 0);
  for (int i = static_cast<int>(pairs.size()); in_place && i < static_cast<int>(node.inputs.size());
       ++i) {
    pairs.push_back({i, i, false});
  }
  const std::vector<int64_t> own = node.attributes.get_ints("inplace", {});
  for (size_t i = 0; i + 1 < own.size(); i += 2) {
    pairs.push_back({static_cast<int>(own[i]), static_cast<int>(own[i + 1]), false});
  }
  return pairs;
}

std::optional<PhaseKind> updating_phase(const Program& program) {
  std::optional<PhaseKind> found;
  for (const ProgramVariant& variant : program.variants) {
    for (const Phase& phase : variant.phases) {
      const bool updates = std::any_of(phase.nodes.begin(), phase.nodes.end(), [&](NodeId id) {
        return variant.graph.node(id).region == Region::kUpdate;
      });
      if (phase.kind == PhaseKind::kUpdate) {
        return phase.kind;
      }
      if (updates && phase.kind != PhaseKind::kReduce) {
        found = PhaseKind::kBackward;
      }
    }
  }
  return found;
}

std::string program_string(const Program& program) {
  std::ostringstream out;
  const auto write_cells = [&out](const std::vector<Cell>& cells) {
    for (const Cell& cell : cells) {
      out << " " << cell_name(cell);
    }
    out << "\n";
  };
  out << "rank " << program.rank << " of " << program.world_size << " (stage "
      << program.coordinates.stage << ", data rank " << program.coordinates.data_rank
      << ", tensor rank " << program.coordinates.tensor_rank << ")\ncells:";
  write_cells(program.cells);
  for (size_t i = 0; i < program.windows.size(); ++i) {
    out << window_name(static_cast<StepWindow>(i + 1)) << ":";
    write_cells(program.windows[i]);
  }
  for (const ProgramVariant& variant : program.variants) {
    out << "micro-batch of " << variant.micro_batch_size << ":\n";
    for (const Phase& phase : variant.phases) {
      out << "  " << phase.virtual_stage << phase_letter(phase.kind) << "\n";
      for (const NodeId id : phase.nodes) {
        const Node& node = variant.graph.node(id);
        out << "    " << node.name << " = " << node.op_type << "(";
        for (size_t i = 0; i < node.inputs.size(); ++i) {
          out << (i == 0 ? "" : ", ")
              << (node.inputs[i] == kNoValue ? "-" : variant.graph.value(node.inputs[i]).name);
        }
        out << ") ->";
        for (const ValueId output : node.outputs) {
          if (output != kNoValue) {
            const Value& value = variant.graph.value(output);
            out << " " << value.name << dtype_name(value.type.dtype)
                << shape_string(value.type.shape);
          }
        }
        out << "\n";
      }
    }
  }
  return out.str();
}

}  // namespace trainrt
