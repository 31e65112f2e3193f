# cmake --install --component program: gradwire and gradwire-bench, and in scripts/deb.sh their man pages.
include(GNUInstallDirs)

set(data_dir ${CMAKE_INSTALL_DATADIR}/gradwire)
set(private_dir ${CMAKE_INSTALL_LIBDIR}/gradwire)
gradwire_pages(program gradwire)
gradwire_folders(program ${CMAKE_INSTALL_BINDIR} ${private_dir} ${data_dir})

# Where the programs look for Python programs (trainer/cli/commands.cpp) and their private library.
install(TARGETS gradwire gradwire-bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
install(TARGETS gradwire_blas LIBRARY DESTINATION ${private_dir} COMPONENT program)
# $ORIGIN is unknown where /proc is not mounted. Packages have the prefix /usr.
set_target_properties(gradwire gradwire-bench PROPERTIES
  INSTALL_RPATH "$ORIGIN/../${private_dir};/usr/${private_dir}")
install(DIRECTORY trainer/report trainer/plan/clusters DESTINATION ${data_dir} COMPONENT program
  PATTERN __pycache__ EXCLUDE)
install(FILES ${CMAKE_BINARY_DIR}/man/gradwire.1 ${CMAKE_BINARY_DIR}/man/gradwire-bench.1
  DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT program OPTIONAL)
