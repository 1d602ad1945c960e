#include "runtime/run_trace.h"

#include <cerrno>
#include <cstring>

#include "graph/base/error.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

StepTrace::Clock::time_point meet(Communicator* world) {
  if (world != nullptr) {
    world->barrier();
  }
  return StepTrace::Clock::now();
}

}  // namespace

void StepTrace::add(const std::string& name,
                    TraceLane lane,
                    Clock::time_point start,
                    Clock::time_point end,
                    int64_t bytes,
                    std::string op_type) {
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  events_.push_back(
      {name, lane, seconds(start - origin_), seconds(end - start), 0, bytes, std::move(op_type)});
}

RunTrace::RunTrace(const std::string& path, const Plan& plan, Communicator* world)
    : path_(path),
      world_(world),
      rank_(world == nullptr ? 0 : world->rank()),
      recorder_(meet(world)) {
  if (rank_ != 0) {
    return;
  }
  errno = 0;
  if (std::ostream* standard = standard_stream(path)) {
    stream_ = standard;
  } else {
    file_.open(path, std::ios::trunc);
  }
  *stream_ << kTraceBegin;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    const RankCoordinates at = rank_coordinates(plan, rank);
    *stream_ << trace_rank_lines(rank,
                                 concat("rank ",
                                        rank,
                                        ": stage ",
                                        at.stage,
                                        ", data ",
                                        at.data_rank,
                                        ", tensor ",
                                        at.tensor_rank));
  }
  TRAINRT_REQUIRE(
      stream_->good(), kIo, "cannot write --trace '", path, "': ", std::strerror(errno));
}

std::string RunTrace::gather(const std::string& own) const {
  if (world_ == nullptr) {
    return own;
  }
  const size_t size = static_cast<size_t>(world_->world_size());
  std::vector<int64_t> counts(size);
  const int64_t count = static_cast<int64_t>(own.size());
  world_->all_gather(&count, counts.data(), std::vector<int64_t>(size, 1), DType::kInt64);
  int64_t total = 0;
  for (const int64_t bytes : counts) {
    total += bytes;
  }
  std::string all(static_cast<size_t>(total), ' ');
  world_->all_gather(own.data(), all.data(), counts, DType::kUInt8);
  return all;
}

void RunTrace::end_step(int64_t step, bool meets) {
  std::vector<TraceEvent>& events = recorder_.events();
  for (TraceEvent& event : events) {
    event.step = step;
    totals_.add(event);
    lines_ += trace_line(rank_, event);
  }
  if (!events.empty()) {
    seconds_ += events.back().start_seconds + events.back().seconds - events.front().start_seconds;
  }
  events.clear();
  if (!meets) {
    return;
  }
  const std::string all = gather(lines_);
  lines_.clear();
  if (rank_ == 0) {
    errno = 0;
    *stream_ << all << std::flush;
    TRAINRT_REQUIRE(
        stream_->good(), kIo, "cannot write --trace '", path_, "': ", std::strerror(errno));
  }
}

std::string RunTrace::finish() {
  const std::string all = gather(totals_.line(concat("rank ", rank_), seconds_));
  if (rank_ != 0) {
    return "";
  }
  errno = 0;
  *stream_ << kTraceEnd << std::flush;
  TRAINRT_REQUIRE(
      stream_->good(), kIo, "cannot write --trace '", path_, "': ", std::strerror(errno));
  return all;
}

}  // namespace trainrt
