// Comma-separated tables with quoted fields and a header line.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace trainrt {

// Column name -> text, for each data line. Missing cells are empty. `where` names the file in
// messages; throws kInvalidArgument for a table without header or with a line of too many cells.
using CsvRow = std::map<std::string, std::string>;
std::vector<CsvRow> parse_csv(std::string_view text, const std::string& where);

}  // namespace trainrt
