// Error codes that the CUDA runtime and the driver share, and the settings of the stand-ins.
#pragma once

#include <cstdlib>

namespace standin {

enum Code : int {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDirection = 21,
  kDevicesUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kFirstSticky = 700,  // from here to kLastSticky, an error makes the context unusable
  kAssert = 710,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kLaunchFailure = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCapturedEvent = 907,
};

inline bool is_sticky(int code) {
  return code >= kFirstSticky && code <= kLaunchFailure && code != kAlreadyRegistered && code != kNotRegistered;
}

// Returns the number in an environment variable, or `otherwise`.
inline long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtol(text, nullptr, 10) : otherwise;
}

}  // namespace standin
