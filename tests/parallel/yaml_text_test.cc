#include "parallel/yaml_text.h"

#include <gmock/gmock.h>

#include "graph/base/error.h"

namespace trainrt {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

void expect_refused(const std::string& text, const std::string& part) {
  try {
    parse_yaml(text, "c.yaml");
    FAIL() << "accepted " << text.substr(0, 80);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), StartsWith("c.yaml"));
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(YamlTextTest, AliasesMayRepeatButNotContainThemselves) {
  EXPECT_EQ(parse_yaml("a: &a [1, 2]\nb: *a\nc: [*a, *a]", "c.yaml")["c"][1][1].as<int>(), 2);
  for (const char* text : {"a: &a [*a]",
                           "a: 1\nfreeze: &a [*a]",
                           "optim: &a {name: sgd, x: *a}",
                           "&a [*a]",
                           "&a [[1, {b: *a}]]"}) {
    expect_refused(text, "contains itself");
  }
}

TEST(YamlTextTest, WhatAliasesStandForIsCounted) {
  std::string text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 10; ++i) {
    text += concat("a", i, ": &a", i, " [");
    for (int k = 0; k < 9; ++k) {
      text += concat(k == 0 ? "" : ", ", "*a", i - 1);
    }
    text += "]\n";
  }
  expect_refused(text, "more than 1000000 values");
}

TEST(YamlTextTest, DeepNestingEndsInAMessage) {
  const std::string most = std::string(kMostYamlDepth, '[') + std::string(kMostYamlDepth, ']');
  EXPECT_TRUE(parse_yaml(most, "c.yaml").IsSequence());
  expect_refused("[" + most + "]", "nested more than 64 deep");
  expect_refused(std::string(100'000, '['), "");
  std::string block = "a: ";
  for (int i = 0; i < 20'000; ++i) {
    block += "- ";
  }
  expect_refused(block, "");
}

TEST(YamlTextTest, OneDocumentIsRead) {
  EXPECT_EQ(parse_yaml("---\na: 1\n...\n", "c.yaml")["a"].as<int>(), 1);
  EXPECT_TRUE(parse_yaml("", "c.yaml").IsNull());
  expect_refused("a: 1\n---\nb: 2\n", "c.yaml:3: a second document");
}

TEST(YamlTextTest, KeysAreWords) {
  expect_refused("{[1, 2]: 3}", "a key is a list; wanted a word");
  expect_refused("a: {b: 1, b: 2}", "'b' is given twice");
}

}  // namespace
}  // namespace trainrt
