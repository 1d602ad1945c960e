// Sums and maxima over runs of a chain's blocks, each in a step or two: what the memory of a
// pipeline stage is asked for wherever the search tries a cut.
#pragma once

#include <cstddef>
#include <vector>

#include "planner/model_profile.h"

namespace trainrt {

// The place of the largest of values [first, end), the first of equals: a table of the largest of
// all runs of 2^k values, two of which cover any run.
class LargestOf {
 public:
  explicit LargestOf(std::vector<double> values);
  size_t at(size_t first, size_t end) const;
  double value(size_t first, size_t end) const { return values_[at(first, end)]; }

 private:
  size_t larger(size_t a, size_t b) const { return values_[b] > values_[a] ? b : a; }

  std::vector<double> values_;
  std::vector<std::vector<size_t>> runs_;  // [k][i]: of [i, i + 2^k)
};

// Of blocks [first, end), under one kind of recompute.
class BlockSums {
 public:
  BlockSums(const ModelProfile& profile, RecomputeMode recompute);
  double parameters(int first, int end) const { return sum(parameters_, first, end); }
  double shared_parameters(int first, int end) const { return sum(shared_, first, end); }
  double kept(int first, int end) const { return sum(kept_, first, end); }
  // What weight gradients that are put off keep beside: gradients, and what has run again for them.
  double put_off(int first, int end) const { return sum(put_off_, first, end); }
  double working(int block) const { return working_[static_cast<size_t>(block)]; }
  double largest_parameters(int first, int end) const {
    return most(largest_parameters_, first, end);
  }
  double largest_transient(int first, int end) const { return most(transient_, first, end); }
  // What the largest block that runs again keeps without recompute.
  double largest_again(int first, int end) const { return most(again_, first, end); }
  // The block whose backward needs most: what is kept up to it, and what it works with itself.
  int busiest(int first, int end) const;

 private:
  static double sum(const std::vector<double>& prefix, int first, int end) {
    return prefix[static_cast<size_t>(end)] - prefix[static_cast<size_t>(first)];
  }
  static double most(const LargestOf& largest, int first, int end) {
    return largest.value(static_cast<size_t>(first), static_cast<size_t>(end));
  }

  std::vector<double> parameters_, shared_, kept_, put_off_;  // prefix sums
  std::vector<double> working_;                               // by block: beyond what is kept
  LargestOf largest_parameters_, transient_, again_, busiest_;
};

}  // namespace trainrt
