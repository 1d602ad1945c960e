// What was asked of the double's libraries, counted.
#include <map>

#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/cuda_streams.h"

namespace cuda_double {

namespace {

struct Counts {
  std::map<unsigned, int64_t> products;   // by epilogue
  std::map<std::string, int64_t> graphs;  // by operation
  int64_t additions = 0, identifiers = 0, plans = 0;
};

Counts& counts() {
  static Counts instance;
  return instance;
}

}  // namespace

void reset_counts() {
  const Lock lock;
  counts() = {};
}

int64_t num_products(unsigned epilogue) {
  const Lock lock;
  return counts().products[epilogue];
}
void count_product(unsigned epilogue) {
  const Lock lock;
  ++counts().products[epilogue];
}
int64_t num_additions() {
  const Lock lock;
  return counts().additions;
}
void count_addition() {
  const Lock lock;
  ++counts().additions;
}
int64_t num_graphs(const std::string& operation) {
  const Lock lock;
  return counts().graphs[operation];
}
void count_graph(const std::string& operation) {
  const Lock lock;
  ++counts().graphs[operation];
}
int64_t num_plans() {
  const Lock lock;
  return counts().plans;
}
void count_plan() {
  const Lock lock;
  ++counts().plans;
}
int64_t num_identifiers() {
  const Lock lock;
  return counts().identifiers;
}
void count_identifier() {
  const Lock lock;
  ++counts().identifiers;
}

}  // namespace cuda_double
