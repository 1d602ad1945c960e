// The report as a web page, as a browser without a screen renders it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "tests/support/png_image.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class PlanPageTest : public ::testing::Test {
 protected:
  struct Page {
    std::string dom;
    std::string log;  // what the browser complained of
    PngImage picture;
  };

  // Plans, and opens the page.
  Page open(const std::vector<std::string>& model,
            const std::vector<std::string>& flags,
            int exit_code) {
    std::vector<std::string> make = {"model"};
    make.insert(make.end(), model.begin(), model.end());
    make.insert(make.end(), {"-o", folder_.file("m.onnx")});
    EXPECT_EQ(run_trainrt(make).exit_code, 0);
    const std::string html = folder_.file("page.html");
    std::vector<std::string> plan = {
        "plan", folder_.file("m.onnx"), "--format", "html", "-o", html};
    plan.insert(plan.end(), flags.begin(), flags.end());
    EXPECT_EQ(run_trainrt(plan).exit_code, exit_code);
    Page page;
    browse("--dump-dom", html);
    page.dom = file_text(folder_.file("out"));
    page.log = file_text(folder_.file("log"));
    browse("--window-size=1100,1600 --hide-scrollbars --screenshot=" + folder_.file("page.png"),
           html);
    page.picture = read_png(folder_.file("page.png"));
    source_ = file_text(html);
    return page;
  }

  void browse(const std::string& flags, const std::string& html) {
    const std::string command =
        "chromium --headless --no-sandbox --disable-gpu "
        "--disable-dev-shm-usage --disable-background-networking "
        "--enable-logging=stderr --user-data-dir=" +
        folder_.file("profile") + " " + flags + " file://" + html + " >" + folder_.file("out") +
        " 2>" + folder_.file("log");
    ASSERT_EQ(std::system(command.c_str()), 0) << file_text(folder_.file("log"));
  }

  // True of every page.
  void expect_sound(const Page& page) {
    EXPECT_THAT(page.log, Not(HasSubstr("CONSOLE"))) << "an error, or something that was refused";
    for (const char* fetched : {"http:", "https:", "src=", "url(", "@import", "<script", "<link"}) {
      EXPECT_THAT(source_, Not(HasSubstr(fetched)));
    }
    // Every colour that the page draws with is on the picture, on mostly white ground.
    std::map<std::array<uint8_t, 3>, int> count;
    for (const auto& pixel : page.picture.pixels) {
      ++count[pixel];
    }
    const int white = count[{255, 255, 255}];
    const int all = page.picture.width * page.picture.height;
    EXPECT_GT(white, all / 3);
    EXPECT_LT(white, all - all / 50);
    EXPECT_GT((count[{0x2d, 0xa4, 0x4e}]), 300) << "activations and compute are green";
  }

  static size_t occurrences(const std::string& text, const std::string& word) {
    size_t found = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
      ++found;
    }
    return found;
  }

  // The rendered element with this id, tags included.
  static std::string element(const std::string& dom,
                             const std::string& tag,
                             const std::string& id) {
    const size_t begin = dom.find("<" + tag + " id=\"" + id + "\"");
    return begin == std::string::npos
               ? ""
               : dom.substr(begin, dom.find("</" + tag + ">", begin) - begin);
  }

  TemporaryFolder folder_;
  std::string source_;
};

TEST_F(PlanPageTest, ShowsThePlan) {
  const Page page =
      open({"gpt2", "--layers", "4", "--hidden", "4096", "--heads", "32", "--seq", "128"},
           {"--cluster",
            "dgx-a100",
            "--batch-size",
            "32",
            "--pp",
            "2",
            "--tp",
            "2",
            "--micro-batch-size",
            "4"},
           0);
  expect_sound(page);
  EXPECT_TRUE(std::regex_search(
      page.dom, std::regex("2-way data, 2-way tensor( and sequence)?, 2-stage pipeline")));
  const std::string time = element(page.dom, "table", "time");
  EXPECT_THAT(time, HasSubstr("compute"));
  EXPECT_THAT(time, HasSubstr("pipeline bubble"));
  // The shares of the time add up.
  const std::regex share("([0-9.]+) %");
  double sum = 0;
  for (std::sregex_iterator at(time.begin(), time.end(), share), end; at != end; ++at) {
    sum += std::stod((*at)[1]);
  }
  EXPECT_NEAR(sum, 100, 0.5);
  EXPECT_GE(occurrences(element(page.dom, "svg", "memory"), "<line"), 2u) << "a limit for each bar";
  const std::string pipeline = element(page.dom, "svg", "pipeline");
  EXPECT_EQ(occurrences(pipeline, "F of micro-batch"), 8u);  // 4 micro-batches on 2 stages
  EXPECT_EQ(occurrences(pipeline, "stage "), 2u + occurrences(pipeline, "virtual stage "));
  EXPECT_THAT(element(page.dom, "table", "placements"), HasSubstr("shard("));
  const std::string what_if = element(page.dom, "table", "what-if");
  EXPECT_THAT(what_if, HasSubstr("10 % more memory"));
  EXPECT_THAT(what_if, HasSubstr("a batch of 64 samples"));
  EXPECT_THAT(what_if, HasSubstr("one device fewer"));
  EXPECT_THAT(element(page.dom, "table", "padding"), HasSubstr("multiples of"));
}

TEST_F(PlanPageTest, SaysWhatIsMissing) {
  const Page page =
      open({"gpt2", "--layers", "12", "--hidden", "8192", "--heads", "64", "--seq", "128"},
           {"--cluster", "t4", "--batch-size", "8"},
           4);
  expect_sound(page);
  const std::string box = element(page.dom, "div", "infeasible");
  EXPECT_THAT(box, HasSubstr("Does not fit"));
  EXPECT_TRUE(
      std::regex_search(box, std::regex("[0-9]+ bytes\\) short on stage [0-9]+, rank [0-9]+")));
  EXPECT_THAT(box, HasSubstr("Would fit: "));
  EXPECT_THAT(element(page.dom, "svg", "memory"), HasSubstr("too much"));
}

}  // namespace
}  // namespace trainrt::testing
