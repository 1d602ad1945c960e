#include "planner/step_devices.h"

#include <algorithm>

namespace trainrt {

StepDevices::StepDevices(const StepRequest& request)
    : request_(request),
      topology_(*request.topology),
      layout_(*request.layout),
      alike_(request.uniform && request.layout->devices.empty()) {
  const bool cached = request.cache != nullptr && layout_.device_order >= 0;
  links_ = &(cached ? request.cache : &own_prices_)
                ->links[{layout_.data, layout_.tensor, layout_.pipeline, layout_.device_order}];
  if (links_->data.empty()) {
    const auto stages = static_cast<size_t>(layout_.pipeline);
    const size_t places = stages * static_cast<size_t>(layout_.data);
    links_->slowest_type.assign(places, -1);
    links_->tensor.resize(places);
    links_->transfer.resize(places);
    links_->data.resize(stages);
  }
}

const CostModel& StepDevices::cost_model(int device_type) {
  auto& models = request_.cache != nullptr ? request_.cache->cost_models : own_prices_.cost_models;
  const auto found = models.find(device_type);
  return found != models.end()
             ? found->second
             : models
                   .emplace(device_type,
                            CostModel(topology_.types[static_cast<size_t>(device_type)],
                                      request_.precision))
                   .first->second;
}

int StepDevices::slowest_type(int stage, int data_rank) {
  int& slowest = links_->slowest_type[place(stage, data_rank)];
  if (slowest < 0) {
    double rate = 0;
    for (int i = 0; i < layout_.tensor; ++i) {
      const int index = type_index(rank_of(stage, data_rank, i));
      const double own = topology_.types[static_cast<size_t>(index)].peak_flops(request_.precision);
      if (slowest < 0 || own < rate) {
        slowest = index;
        rate = own;
      }
    }
  }
  return slowest;
}

const GroupLinks& StepDevices::find(std::unique_ptr<GroupLinks>* known,
                                    const std::vector<int>& group,
                                    int concurrent) {
  if (*known == nullptr) {
    *known = std::make_unique<GroupLinks>(group_links(topology_, group, concurrent));
  }
  return **known;
}

const GroupLinks& StepDevices::tensor_links(int stage, int data_rank) {
  stage = alike_ ? 0 : stage;
  data_rank = alike_ ? 0 : data_rank;
  std::unique_ptr<GroupLinks>* known = &links_->tensor[place(stage, data_rank)];
  std::vector<int> group;
  for (int i = 0; *known == nullptr && i < layout_.tensor; ++i) {
    group.push_back(layout_.device(rank_of(stage, data_rank, i)));
  }
  return find(known, group, group.empty() ? 1 : concurrent_groups(group));
}

const GroupLinks& StepDevices::data_links(int stage) {
  stage = alike_ ? 0 : stage;
  std::unique_ptr<GroupLinks>* known = &links_->data[static_cast<size_t>(stage)];
  std::vector<int> group;
  for (int d = 0; *known == nullptr && d < layout_.data; ++d) {
    group.push_back(layout_.device(rank_of(stage, d, 0)));
  }
  return find(known, group, group.empty() ? 1 : concurrent_groups(group));
}

const GroupLinks& StepDevices::transfer_links(int stage, int data_rank) {
  std::unique_ptr<GroupLinks>& known = links_->transfer[place(stage, data_rank)];
  if (known != nullptr) {
    return *known;
  }
  const int sender = layout_.device(rank_of(stage, data_rank, 0));
  const int receiver = layout_.device(rank_of((stage + 1) % layout_.pipeline, data_rank, 0));
  return find(
      &known, {sender, receiver}, static_cast<int>(topology_.host_of(sender).devices.size()));
}

const GroupLinks& StepDevices::tied_links() {
  const int first = layout_.device(rank_of(0, 0, 0));
  const int last = layout_.device(rank_of(layout_.pipeline - 1, 0, 0));
  // One such pair for each rank of the first stage, of whom so many share a host's network.
  return find(&links_->tied,
              {first, last},
              std::min(static_cast<int>(topology_.host_of(first).devices.size()),
                       layout_.data * layout_.tensor));
}

int StepDevices::concurrent_groups(const std::vector<int>& group) const {
  const int host = topology_.device(group[0]).host;
  int here = 0;
  for (const int device : group) {
    here += topology_.device(device).host == host ? 1 : 0;
  }
  const int on_host = static_cast<int>(topology_.hosts[static_cast<size_t>(host)].devices.size());
  return std::max(1, std::min(on_host, layout_.world_size()) / std::max(1, here));
}

}  // namespace trainrt
