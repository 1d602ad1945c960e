// What the ranks of a layout run on: types of devices, their cost models, and the links of the
// groups that they form.
#pragma once

#include <memory>
#include <vector>

#include "planner/step_cost.h"

namespace trainrt {

class StepDevices {
 public:
  explicit StepDevices(const StepRequest& request);

 protected:
  int rank_of(int stage, int data_rank, int tensor_rank) const {
    return (stage * layout_.data + data_rank) * layout_.tensor + tensor_rank;
  }
  int type_index(int rank) const { return topology_.device(layout_.device(rank)).type; }
  const DeviceType& type(int rank) const { return topology_.type_of(layout_.device(rank)); }
  // The tensor group's type with the lowest rate: the others wait for it.
  int slowest_type(int stage, int data_rank);
  const CostModel& cost_model(int device_type);

  // Of the groups of a stage, and data rank; references stay valid.
  const GroupLinks& tensor_links(int stage, int data_rank);
  const GroupLinks& data_links(int stage);
  // To the next stage, cyclically.
  const GroupLinks& transfer_links(int stage, int data_rank);
  // Between the first and the last stage.
  const GroupLinks& tied_links();

  const StepRequest& request_;
  const Topology& topology_;
  const Layout& layout_;
  PriceCache own_prices_;  // where the request has no cache

 private:
  const GroupLinks& find(std::unique_ptr<GroupLinks>* known,
                         const std::vector<int>& group,
                         int concurrent);
  // Groups of one kind that share the first device's host.
  int concurrent_groups(const std::vector<int>& group) const;
  size_t place(int stage, int data_rank) const {
    return static_cast<size_t>(stage * layout_.data + data_rank);
  }

  LayoutLinks* links_;
  bool alike_;  // all groups of a kind are
};

}  // namespace trainrt
