// GRADWIRE_VERSION, the version in gradwire.h as a string literal.
#pragma once

#include <gradwire/gradwire.h>

#define GRADWIRE_QUOTE_(number) #number
#define GRADWIRE_QUOTE(number) GRADWIRE_QUOTE_(number)
#define GRADWIRE_VERSION \
  GRADWIRE_QUOTE(GW_VERSION_MAJOR) "." GRADWIRE_QUOTE(GW_VERSION_MINOR) "." GRADWIRE_QUOTE(GW_VERSION_PATCH)
