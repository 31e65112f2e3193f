#include "trainer/cli/cli.h"

int main(int argc, char** argv) {
  return gradwire::cli_main(argc, argv);
}
