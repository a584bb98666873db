// Parses the line of text that describes an operation in a framework's compiled program:
//
//   COLLECTIVE OP ROOT PROCESS_SET PRESCALE POSTSCALE WIRE NAME
//
// COLLECTIVE, OP, ROOT and PROCESS_SET are numbers as in multiring.h. WIRE is "-" for no compression. NAME may be
// empty. This file is header-only, because every framework's library contains it.
#pragma once

#include <charconv>
#include <sstream>
#include <string>

#include "entry/multiring.h"

namespace multiring {

struct CallText {
  int32_t collective = 0, op = 0, root = 0, process_set = 0;
  double prescale = 1, postscale = 1;
  std::string wire, name;

  bool parse(const std::string& text) {
    std::istringstream words(text);
    std::string before, after;
    words >> collective >> op >> root >> process_set >> before >> after >> wire;
    if (!words || !number(before, prescale) || !number(after, postscale)) return false;
    words.get();
    std::getline(words, name, '\0');
    return true;
  }

  bool is_whole() const { return collective == MULTIRING_ALL_REDUCE || collective == MULTIRING_BROADCAST; }

  // Returns a request with the values of the text. The caller adds arrays and callbacks. The request points into this
  // object, which must outlive it.
  MultiringRequest request() const {
    MultiringRequest request{};
    request.size = sizeof request;
    request.process_set = process_set;
    request.collective = collective;
    request.op = op;
    request.root = root;
    request.prescale = prescale;
    request.postscale = postscale;
    request.name = name.empty() ? nullptr : name.c_str();
    request.wire = wire == "-" ? nullptr : wire.c_str();
    return request;
  }

 private:
  static bool number(const std::string& text, double& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
  }
};

}  // namespace multiring
