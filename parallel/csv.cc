#include "parallel/csv.h"

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Cells of all lines; a quoted cell may hold commas, line breaks and doubled quotes.
std::vector<std::vector<std::string>> split_cells(std::string_view text) {
  std::vector<std::vector<std::string>> lines(1, std::vector<std::string>(1));
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      if (quoted && i + 1 < text.size() && text[i + 1] == '"') {
        lines.back().back() += '"';
        ++i;
      } else {
        quoted = !quoted;
      }
    } else if (c == ',' && !quoted) {
      lines.back().emplace_back();
    } else if (c == '\n' && !quoted) {
      lines.emplace_back(1);
    } else if (c != '\r') {
      lines.back().back() += c;
    }
  }
  return lines;
}

}  // namespace

std::vector<CsvRow> parse_csv(std::string_view text, const std::string& where) {
  const std::vector<std::vector<std::string>> lines = split_cells(text);
  const std::vector<std::string>& header = lines[0];
  TRAINRT_REQUIRE(header.size() > 1, kInvalidArgument, where, ": the first line must name columns");
  std::vector<CsvRow> rows;
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string>& cells = lines[i];
    if (cells.size() == 1 && cells[0].empty()) {
      continue;
    }
    TRAINRT_REQUIRE(cells.size() <= header.size(),
                    kInvalidArgument,
                    where,
                    ":",
                    i + 1,
                    ": ",
                    cells.size(),
                    " cells under ",
                    header.size(),
                    " columns");
    CsvRow row;
    for (size_t k = 0; k < header.size(); ++k) {
      row[header[k]] = k < cells.size() ? cells[k] : "";
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace trainrt
