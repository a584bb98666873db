// What an operation of a framework's program does, as the line of text that stands in the program:
//
//   COLLECTIVE OP ROOT PROCESS_SET PRESCALE POSTSCALE WIRE NAME
//
// numbers of multiring.h; WIRE may be "-", for none, and NAME may be empty. Header only: each framework's library has
// it.
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

  // A request with all that the text says; the caller adds arrays and callbacks. It points into this object.
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
